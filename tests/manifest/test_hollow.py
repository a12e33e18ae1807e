"""A manifest that vouches for nothing is none, and neither is one over several checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import manifest
from ckptdrill.errors import UserError
from ckptdrill.manifest import ProblemKind
from tests.manifest.folders import make

FILES = {"shard": b"weights"}

COMMITTED = {"manifest_version": 1, "status": "committed", "completed_step": 1000}


@pytest.mark.parametrize("content", [{}, COMMITTED, {**COMMITTED, "files": []}])
def test_a_manifest_without_files_is_unreadable_and_never_selected(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    good = make(tmp_path / "step-3", FILES)
    manifest.write(
        manifest.path_of(good), manifest.describe(good, manifest.Facts(completed_step=3))
    )
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    manifest.path_of(hollow).write_text(json.dumps(content))
    assert [p.kind for p in manifest.check(hollow).problems] == [ProblemKind.MANIFEST_UNREADABLE]
    chosen = manifest.select(tmp_path).chosen
    assert chosen is not None
    assert chosen.path == good


@pytest.mark.parametrize("step", [True, "7", 7.5, 10**30])
def test_a_step_of_another_type_is_unreadable(tmp_path: Path, step: object) -> None:
    folder = make(tmp_path / "step-3", FILES)
    manifest.write(manifest.path_of(folder), manifest.describe(folder))
    record = json.loads(manifest.path_of(folder).read_bytes())
    manifest.path_of(folder).write_text(json.dumps({**record, "completed_step": step}))
    problems = manifest.check(folder).problems
    assert [p.kind for p in problems] == [ProblemKind.MANIFEST_UNREADABLE]


def test_a_root_of_generations_gets_no_manifest(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = make(tmp_path / f"step-{number}", FILES)
        manifest.write(manifest.path_of(folder), manifest.describe(folder))
    with pytest.raises(UserError, match="2 checkpoints with manifests of their own"):
        manifest.describe(tmp_path)


def test_a_checkpoint_of_an_unknown_step_does_not_take_the_pointer(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    told = make(tmp_path / "staged-2", FILES)
    manifest.publish(told, tmp_path / "out/step-2", manifest.Facts(completed_step=2))
    manifest.publish(make(tmp_path / "staged", FILES), tmp_path / "out/step-x")
    assert (tmp_path / "out/latest").read_text().strip() == "step-2"
