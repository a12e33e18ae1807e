"""Manifests of a source and of the first checkpoint after a restore; a torn one says why it has
none.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptdrill import manifest
from ckptdrill.matrix import Matrix
from ckptdrill.model import Checkpoint, Environment, Job, Launch, Policy, Role, Tolerance, Topology
from ckptdrill.saved import write_manifests
from ckptdrill.step import Setting
from ckptdrill.store import LAUNCH_MANIFESTS_NAME, RunFolder, read_json, write_json

TWO = Topology("two", dp_shard=2)
SOURCE = Launch("source.two", Role.SOURCE, TWO, "default", 12)
RESTORE = Launch("restore.two", Role.RESTORE, TWO, "default", 12, Checkpoint("source.two", 4))
REPEAT = Launch("repeat.two", Role.REPEAT, TWO, "default", 12)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    job = Job(
        program="/jobs/train.py",
        module=None,
        args=(),
        resume_args=("{resume}",),
        checkpoint="{out}/step-{step}.pt",
        saves=(4, 8, 12),
        restore_step=4,
        window=8,
        cwd="/",
    )
    matrix = Matrix(
        name="quick",
        path=Path("quick.yaml"),
        text=b"",
        job=job,
        environments={"default": Environment("default", "/usr/bin/python3")},
        topologies={"two": TWO},
        tolerance=Tolerance(),
        policy=Policy(),
        repeats=0,
        cells=(),
    )
    run = RunFolder(tmp_path / "run")
    write_json(run.run_json, {"installed": {"default": {"torch": "2.13.0"}}, "image_digest": "aa"})
    return Setting(matrix, run, {each.id: each for each in (SOURCE, RESTORE, REPEAT)})


def save(setting: Setting, launch: Launch, *steps: int) -> Path:
    out = setting.run.work(launch.id) / "out"
    out.mkdir(parents=True, exist_ok=True)
    for step in steps:
        torch.save({"w": torch.full((4,), float(step))}, out / f"step-{step}.pt")
    return out


def told(setting: Setting, launch: Launch) -> list[tuple[int, str | None]]:
    write_manifests(setting, launch)
    path = setting.run.launch(launch.id) / LAUNCH_MANIFESTS_NAME
    return [(each["step"], each["file"]) for each in read_json(path)] if path.exists() else []


def test_of_a_source_what_others_restore_is_described(setting: Setting) -> None:
    save(setting, SOURCE, 4, 8, 12)
    assert told(setting, SOURCE) == [(4, "step-4.manifest.json")]
    record = manifest.read(setting.run.launch(SOURCE.id) / "step-4.manifest.json")
    assert record.completed_step == 4
    assert (record.topology.world_size, record.topology.dp) == (2, 2)
    assert (record.software.torch, record.software.image_digest) == ("2.13.0", "aa")
    saved = setting.run.work(SOURCE.id) / "out" / "step-4.pt"
    assert not manifest.verify(saved, record)


def test_of_a_restore_the_next_save_is_described(setting: Setting) -> None:
    save(setting, RESTORE, 4, 8, 12)
    assert told(setting, RESTORE) == [(8, "step-8.manifest.json")]


def test_what_was_not_saved_is_not_told(setting: Setting) -> None:
    save(setting, RESTORE, 4, 12)
    assert told(setting, RESTORE) == []
    assert told(setting, replace(RESTORE, waits_for="replay")) == []
    save(setting, REPEAT, 4, 8)
    assert told(setting, REPEAT) == []


def test_a_torn_checkpoint_says_why_it_has_no_manifest(setting: Setting) -> None:
    torn = save(setting, RESTORE, 8) / "step-8.pt"
    torn.unlink()
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"PK")
    write_manifests(setting, RESTORE)
    (entry,) = read_json(setting.run.launch(RESTORE.id) / LAUNCH_MANIFESTS_NAME)
    assert entry["file"] is None
    assert entry["refused"]


def test_nothing_that_was_saved_changes(setting: Setting) -> None:
    out = save(setting, RESTORE, 8)
    before = {path: path.read_bytes() for path in out.iterdir()}
    write_manifests(setting, RESTORE)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
