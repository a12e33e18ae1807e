"""Verification: each way in which a folder can differ from its list is found and named."""

from pathlib import Path

import pytest

from ckptdrill import store
from ckptdrill.packet import ProblemKind, verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "packet"
    for name in ("run.json", "cells/a/verdict.json", "launches/x/rank0.jsonl"):
        store.write_atomic(root / name, name)
    store.write_manifest(root)
    return root


def add_line(folder: Path, line: str) -> None:
    with (folder / store.MANIFEST_NAME).open("a") as stream:
        stream.write(line + "\n")


def found(folder: Path) -> list[tuple[ProblemKind, str]]:
    return [(problem.kind, problem.path) for problem in verify(folder)]


def test_an_untouched_folder_has_no_problem(folder: Path) -> None:
    assert verify(folder) == []


def test_scratch_of_a_run_is_no_problem(folder: Path) -> None:
    store.write_atomic(folder / "work" / "a" / "step-8" / "shard", "x")
    store.write_atomic(folder / ".lock", "")
    assert verify(folder) == []


def test_a_changed_file_differs(folder: Path) -> None:
    (folder / "run.json").write_text("run.jsoN")
    assert found(folder) == [(ProblemKind.DIFFERS, "run.json")]


def test_a_deleted_file_is_missing(folder: Path) -> None:
    (folder / "run.json").unlink()
    assert found(folder) == [(ProblemKind.MISSING, "run.json")]


def test_an_added_file_is_extra(folder: Path) -> None:
    (folder / "cells" / "a" / "note.txt").write_text("trust me")
    assert found(folder) == [(ProblemKind.EXTRA, "cells/a/note.txt")]


def test_a_renamed_file_is_missing_and_extra(folder: Path) -> None:
    (folder / "run.json").rename(folder / "ran.json")
    assert found(folder) == [
        (ProblemKind.MISSING, "run.json"),
        (ProblemKind.EXTRA, "ran.json"),
    ]


def test_without_a_list_nothing_is_verified(folder: Path) -> None:
    (folder / store.MANIFEST_NAME).unlink()
    assert found(folder) == [(ProblemKind.NO_LIST, store.MANIFEST_NAME)]


def test_a_list_that_is_no_text_is_reported(folder: Path) -> None:
    (folder / store.MANIFEST_NAME).write_bytes(b"\xff\xfe\x00")
    assert found(folder) == [(ProblemKind.NO_LIST, store.MANIFEST_NAME)]


@pytest.mark.parametrize("line", ["", "rubbish", "0" * 63 + "  run.json", "0" * 64 + "  "])
def test_a_malformed_line_is_reported(folder: Path, line: str) -> None:
    add_line(folder, line)
    assert found(folder) == [(ProblemKind.MALFORMED, f"{store.MANIFEST_NAME}:4")]


def test_a_second_line_for_a_file_is_malformed(folder: Path) -> None:
    add_line(folder, "0" * 64 + "  run.json")
    assert found(folder) == [(ProblemKind.MALFORMED, "run.json")]


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "cells/../../secret", "a\0b"])
def test_a_path_that_leaves_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_text("secret")
    add_line(folder, "0" * 64 + "  " + name)
    assert found(folder) == [(ProblemKind.OUTSIDE, name)]


@pytest.mark.parametrize("replaced", ["run.json", "cells", "cells/a"])
def test_a_symbolic_link_is_not_followed(folder: Path, replaced: str) -> None:
    """Not even to the very same content, which could change later."""
    outside = folder.parent / "outside"
    (folder / replaced).rename(outside)
    (folder / replaced).symlink_to(outside)
    assert {kind for kind, _ in found(folder)} == {ProblemKind.OUTSIDE}


def test_a_folder_in_place_of_a_file_is_missing(folder: Path) -> None:
    (folder / "run.json").unlink()
    (folder / "run.json").mkdir()
    assert found(folder) == [(ProblemKind.MISSING, "run.json")]
