"""What was, what is, who ran meanwhile: no change of a source is missed, and none is made up."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import isolate, sources
from ckptdrill.errors import UserError
from ckptdrill.journal import StepState, record
from ckptdrill.matrix import Matrix
from ckptdrill.model import Checkpoint, Environment, Job, Launch, Policy, Role, Tolerance, Topology
from ckptdrill.sources import GIVEN, Watch
from ckptdrill.step import Setting, out_of_reach
from ckptdrill.store import RunFolder, read_json, write_json

ONE = Topology("one")
SOURCE = Launch("source.one", Role.SOURCE, ONE, "default", 8)
RESTORE = Launch("restore.one", Role.RESTORE, ONE, "default", 8, Checkpoint("source.one", 4))
STEPS = {launch.id: launch for launch in (SOURCE, RESTORE)}


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """The checkpoint that the run starts from."""
    root = tmp_path / "given" / "step-2"
    root.mkdir(parents=True)
    for name in ("a", "b"):
        (root / name).write_bytes(os.urandom(100))
    return root


@pytest.fixture
def setting(tmp_path: Path, given: Path) -> Setting:
    job = Job(
        program="/jobs/train.py",
        module=None,
        args=(),
        resume_args=("{resume}",),
        checkpoint="{out}/step-{step}",
        saves=(4,),
        restore_step=4,
        window=4,
        cwd="/",
        start_from=str(given),
        start_step=2,
    )
    matrix = Matrix(
        name="quick",
        path=Path("quick.yaml"),
        text=b"",
        job=job,
        environments={"default": Environment("default", "/usr/bin/python3")},
        topologies={"one": ONE},
        tolerance=Tolerance(),
        policy=Policy(),
        repeats=0,
        cells=(),
    )
    return Setting(matrix, RunFolder(tmp_path / "run"), STEPS)


def save(setting: Setting) -> Path:
    """What the source launch leaves."""
    saved = setting.run.work(SOURCE.id) / "out" / "step-4"
    saved.mkdir(parents=True)
    (saved / "shard").write_bytes(b"state")
    return saved


def stored(setting: Setting) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_json(setting.run.sources)["sources"]
    return found


def overwrite_unseen(file: Path) -> None:
    """Other bytes, and size, times and inode as before."""
    status = file.stat()
    file.write_bytes(os.urandom(status.st_size))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_source_is_written_down_before_anything_runs(setting: Setting, given: Path) -> None:
    sources.watch(setting)
    (one,) = stored(setting)
    status = (given / "a").stat()
    assert (one["path"], one["of"], one["after"], one["changes"]) == (str(given), GIVEN, None, [])
    assert one["before"]["a"][:3] == [status.st_size, status.st_mtime_ns, status.st_ino]
    assert len(one["before"]["a"]) == len(read_json(setting.run.sources)["columns"])


def test_sources_that_stay_are_read_twice_and_nothing_is_said(setting: Setting) -> None:
    watch = sources.watch(setting)
    save(setting)
    watch.saved(setting, SOURCE.id)
    watch.look([RESTORE.id])
    assert watch.close(setting) == ()
    assert [each["of"] for each in stored(setting)] == [GIVEN, SOURCE.id]
    assert all(each["after"] == each["before"] for each in stored(setting))


@pytest.mark.parametrize("change", ["append", "remove", "rename", "replace", "add", "touch"])
def test_a_change_is_known_with_the_launches_that_ran_then(
    setting: Setting, given: Path, change: str
) -> None:
    watch = sources.watch(setting)
    watch.look([SOURCE.id])
    if change == "append":
        (given / "a").write_bytes((given / "a").read_bytes() + b"more")
    elif change == "remove":
        (given / "a").unlink()
    elif change == "rename":
        given.parent.rename(given.parent.with_name("moved"))
    elif change == "replace":
        (given / "twin").write_bytes((given / "a").read_bytes())
        (given / "twin").replace(given / "a")
    elif change == "add":
        (given / "c").touch()
    else:
        os.utime(given / "a")
    watch.look([RESTORE.id])
    watch.look([SOURCE.id])
    found = watch.close(setting)
    assert found
    assert all(line.startswith(f"{given}: ") for line in found)
    assert all(line.endswith(f", while {RESTORE.id} ran") for line in found)


def test_other_bytes_of_the_same_size_and_time_are_found_at_the_end(
    setting: Setting, given: Path
) -> None:
    watch = sources.watch(setting)
    for launch in (SOURCE, RESTORE):
        record(setting.run, launch.id, StepState.STARTED)
        record(setting.run, launch.id, StepState.ENDED)
    overwrite_unseen(given / "b")
    watch.look([RESTORE.id])
    assert stored(setting)[0]["changes"] == []
    assert watch.close(setting) == (
        f"{given}: b: content changed, while restore.one, source.one ran",
    )


def test_only_those_who_ran_after_the_save_can_have_changed_it(setting: Setting) -> None:
    record(setting.run, SOURCE.id, StepState.STARTED)
    watch = sources.watch(setting)
    saved = save(setting)
    watch.saved(setting, SOURCE.id)
    record(setting.run, SOURCE.id, StepState.ENDED)
    record(setting.run, RESTORE.id, StepState.STARTED)
    overwrite_unseen(saved / "shard")
    record(setting.run, RESTORE.id, StepState.ENDED)
    assert watch.close(setting) == (f"{saved}: shard: content changed, while restore.one ran",)


def test_what_was_changed_and_put_back_has_changed(setting: Setting, given: Path) -> None:
    watch = sources.watch(setting)
    given.rename(given.with_name("away"))
    watch.look([RESTORE.id])
    given.with_name("away").rename(given)
    assert watch.close(setting) == (
        f"{given}: a: removed, and put back, while restore.one ran",
        f"{given}: b: removed, and put back, while restore.one ran",
    )
    assert sources.watch(setting).close(setting) == watch.close(setting)


def test_a_stopped_run_goes_on_from_what_was_written(setting: Setting, given: Path) -> None:
    sources.watch(setting)
    overwrite_unseen(given / "a")  # while nobody was looking
    again = sources.watch(setting)
    assert again.close(setting) == (f"{given}: a: content changed",)


def test_a_launch_that_runs_again_saves_another_source(setting: Setting) -> None:
    watch = sources.watch(setting)
    saved = save(setting)
    watch.saved(setting, SOURCE.id)
    (saved / "shard").write_bytes(b"other")
    watch.look([RESTORE.id])
    assert len(stored(setting)[1]["changes"]) == 1
    (setting.run.launch(SOURCE.id) / "checkpoints.json").unlink()  # as `journal.wipe` does
    again = sources.watch(setting)
    again.saved(setting, SOURCE.id)
    assert again.close(setting) == ()


def test_what_was_compared_and_then_deleted_keeps_its_word(setting: Setting) -> None:
    watch = sources.watch(setting)
    saved = save(setting)
    watch.saved(setting, SOURCE.id)
    watch.close(setting)
    (saved / "shard").unlink()
    saved.rmdir()
    setting.run.work(SOURCE.id).rename(setting.run.work("elsewhere"))
    assert sources.watch(setting).close(setting) == ()
    assert stored(setting)[1]["after"] == stored(setting)[1]["before"]


@pytest.mark.parametrize(
    "name", [b"new\nline", b"<b>&", b"\xff\xfe", b"back\\slash", b"\\xff\\xfe"]
)
def test_no_name_of_a_file_breaks_the_record(setting: Setting, given: Path, name: bytes) -> None:
    odd = given / os.fsdecode(name)
    odd.write_bytes(b"odd")
    watch = sources.watch(setting)
    odd.unlink()
    (found,) = watch.close(setting)
    assert "removed" in found
    assert len(stored(setting)[0]["before"]) == 3


def test_a_source_that_cannot_be_read_any_more_has_changed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = sources.watch(setting)

    def closed(_root: Path) -> dict[str, list[int | str]]:
        raise UserError("cannot read: Permission denied")

    monkeypatch.setattr(isolate, "snapshot", closed)
    assert len(watch.close(setting)) == 2


def test_names_that_only_look_alike_stay_apart(setting: Setting, given: Path) -> None:
    for name in (b"\xff", b"\\xff"):
        (given / os.fsdecode(name)).touch()
    sources.watch(setting)
    assert len(stored(setting)[0]["before"]) == 4


def test_a_launch_may_write_to_its_own_folder_only(setting: Setting, given: Path) -> None:
    link = given.with_name("latest")
    link.symlink_to(given.name)
    job = replace(setting.matrix.job, start_from=str(link))
    linked = replace(setting, matrix=replace(setting.matrix, job=job))
    assert out_of_reach(linked, SOURCE) == [str(given)]
    assert out_of_reach(linked, RESTORE) == [str(given), str(setting.run.work(SOURCE.id))]


def test_what_stood_between_is_counted(setting: Setting) -> None:
    ends = {
        SOURCE.id: {"bound_read_only": 1, "bind_refused": None},
        RESTORE.id: {"bound_read_only": 0, "bind_refused": "unshare: Operation not permitted"},
    }
    for launch_id, ended in ends.items():
        write_json(setting.run.launch(launch_id) / "launch.json", {"guard": "copy"})
        write_json(setting.run.launch(launch_id) / "exit.json", ended)
    sources.watch(setting).close(setting)
    assert read_json(setting.run.sources)["guards"] == {
        "copy, read-only-bind": 1,
        "copy, no read-only-bind (unshare: Operation not permitted)": 1,
    }


def test_the_watch_of_a_run_without_a_given_checkpoint_is_empty(setting: Setting) -> None:
    job = replace(setting.matrix.job, start_from=None)
    bare = replace(setting, matrix=replace(setting.matrix, job=job))
    assert sources.watch(bare) == Watch(bare.run)
    write_json(setting.run.root / "other.json", {})
    assert sources.watch(bare).close(bare) == ()
