"""Which checkpoint is chosen, why each other one was not, and whether the pointer was right.

Names and pointers lie in most of these folders; the choice never follows them.
"""

import os
from pathlib import Path

import pytest

from ckptdrill import manifest
from ckptdrill.errors import UserError
from ckptdrill.manifest import (
    Facts,
    Pointing,
    ProblemKind,
    Sample,
    Selection,
    Standing,
    Status,
    selecting,
)
from tests.manifest.folders import make


def generation(root: Path, name: str, step: int | None, time: int = 0) -> Path:
    """A committed checkpoint of one file called `name`, of that step, committed at 00:00:`time`."""
    folder = make(root / name, {"weights.bin": f"{name} {step}".encode() * 100})
    record = manifest.commit(folder, manifest.describe(folder, Facts(completed_step=step)))
    when = {"durable_commit_time_utc": f"2026-01-01T00:00:{time:02}.000000Z"}
    storage = record.storage.model_copy(update=when)
    manifest.write(manifest.path_of(folder), record.model_copy(update={"storage": storage}))
    return folder


def standings(selection: Selection) -> dict[str, Standing]:
    return {each.path.name: each.standing for each in selection.generations}


def chosen(selection: Selection) -> str | None:
    return selection.chosen.path.name if selection.chosen else None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three whole generations whose names say the opposite of their age."""
    generation(tmp_path, "step-9", 100)
    generation(tmp_path, "step-5", 200)
    generation(tmp_path, "step-1", 300)
    return tmp_path


def test_the_newest_by_its_step_and_not_by_its_name(root: Path) -> None:
    selection = manifest.select(root)
    assert chosen(selection) == "step-1"
    assert standings(selection) == {
        "step-1": Standing.CHOSEN,
        "step-5": Standing.OLDER,
        "step-9": Standing.OLDER,
    }
    assert [each.why for each in selection.generations] == [
        "the newest that is committed and valid",
        "older than the chosen one; its content was not read",
        "older than the chosen one; its content was not read",
    ]


def test_a_damaged_one_is_passed_over_with_its_reason(root: Path) -> None:
    (root / "step-1/weights.bin").write_bytes(b"step-1 301" * 100)
    selection = manifest.select(root)
    assert chosen(selection) == "step-5"
    first = selection.generations[0]
    assert (first.path.name, first.standing) == ("step-1", Standing.INVALID)
    assert [problem.kind for problem in first.problems] == [ProblemKind.CHECKSUM_DIFFERS]
    assert first.why.startswith("checksum-differs: weights.bin: recorded ")


def test_nothing_valid(root: Path) -> None:
    for folder in root.iterdir():
        (folder / "weights.bin").unlink()
    selection = manifest.select(root)
    assert selection.chosen is None
    assert set(standings(selection).values()) == {Standing.INVALID}


def test_an_empty_folder(tmp_path: Path) -> None:
    assert manifest.select(tmp_path) == Selection(None, (), ())


def test_of_equal_steps_the_later_commit(tmp_path: Path) -> None:
    generation(tmp_path, "b-first", 5, time=1)
    generation(tmp_path, "a-second", 5, time=2)
    assert chosen(manifest.select(tmp_path)) == "a-second"


def test_an_unknown_step_is_older_than_any_known_one(tmp_path: Path) -> None:
    generation(tmp_path, "z", None, time=59)
    generation(tmp_path, "a", 0, time=1)
    assert chosen(manifest.select(tmp_path)) == "a"


def test_a_time_that_is_none_does_not_win(tmp_path: Path) -> None:
    generation(tmp_path, "a", 5, time=1)
    folder = generation(tmp_path, "b", 5)
    record = manifest.read(manifest.path_of(folder))
    storage = record.storage.model_copy(update={"durable_commit_time_utc": "zzzz"})
    manifest.write(manifest.path_of(folder), record.model_copy(update={"storage": storage}))
    assert chosen(manifest.select(tmp_path)) == "a"


def test_the_step_of_a_checkpoint_in_progress_does_not_count(root: Path) -> None:
    folder = make(root / "new", {"weights.bin": b"x"})
    record = manifest.describe(folder, Facts(completed_step=400), status=Status.IN_PROGRESS)
    manifest.write(manifest.path_of(folder), record)
    selection = manifest.select(root)
    assert chosen(selection) == "step-1"
    assert standings(selection)["new"] is Standing.NOT_COMMITTED


def test_folders_and_files_without_a_manifest(root: Path, torch_save_file: Path) -> None:
    make(root / "step-999", {"weights.bin": b"x"})
    (root / "nothing-in-it").mkdir()
    (root / "notes.txt").write_text("x")
    selection = manifest.select(root)
    assert chosen(selection) == "step-1"
    assert standings(selection)["step-999"] is Standing.NO_MANIFEST
    assert standings(selection)[torch_save_file.name] is Standing.NO_MANIFEST
    assert len(selection.generations) == 5
    assert selection.generations[-1].why.startswith("manifest-missing: ")


def test_a_checkpoint_of_one_file(torch_save_file: Path) -> None:
    manifest.commit(torch_save_file, manifest.describe(torch_save_file))
    assert chosen(manifest.select(torch_save_file.parent)) == torch_save_file.name


def test_a_torn_manifest_is_no_manifest(root: Path) -> None:
    os.truncate(manifest.path_of(root / "step-1"), 200)
    selection = manifest.select(root)
    assert chosen(selection) == "step-5"
    assert standings(selection)["step-1"] is Standing.INVALID


def test_checkpoints_further_down_and_a_manifest_inside_another(tmp_path: Path) -> None:
    inner = generation(tmp_path / "run/step-2", "part", 900)
    outer = inner.parent
    manifest.commit(outer, manifest.describe(outer, Facts(completed_step=2)))
    generation(tmp_path / "run", "step-1", 1)
    assert standings(manifest.select(tmp_path)) == {
        "step-2": Standing.CHOSEN,
        "step-1": Standing.OLDER,
    }


def test_the_root_may_be_the_checkpoint(tmp_path: Path) -> None:
    folder = generation(tmp_path, "step-1", 1)
    assert chosen(manifest.select(folder)) == "step-1"


def test_links_are_not_followed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = generation(tmp_path_factory.mktemp("elsewhere"), "step-2", 999)
    (root / "step-2").symlink_to(elsewhere)
    selection = manifest.select(root)
    assert chosen(selection) == "step-1"
    assert "step-2" not in standings(selection)


def test_a_sample_reads_less(root: Path) -> None:
    (root / "step-1/weights.bin").write_bytes(b"step-1 301" * 100)
    assert chosen(manifest.select(root, sample=Sample(0))) == "step-1"
    assert chosen(manifest.select(root, sample=Sample(1))) == "step-5"


def test_older_ones_are_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = selecting.check

    def spy(checkpoint: Path, **options: object) -> manifest.Audit:
        read.append(checkpoint.name)
        return real(checkpoint)

    monkeypatch.setattr(selecting, "check", spy)
    manifest.select(root)
    assert read == ["step-1"]


def test_one_that_vanishes_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = selecting.check

    def gone(checkpoint: Path, **options: object) -> manifest.Audit:
        if checkpoint.name == "step-1":
            checkpoint.rename(root.parent / f"{root.name}-moved")
        return real(checkpoint)

    monkeypatch.setattr(selecting, "check", gone)
    selection = manifest.select(root)
    assert chosen(selection) == "step-5"
    assert standings(selection)["step-1"] is Standing.INVALID


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder at"):
        manifest.select(tmp_path / "nothing")


# --------------------------------------------------------------------------------------------------
# Pointers


@pytest.mark.parametrize(
    ("text", "pointing"),
    [
        ("step-1", Pointing.RIGHT),
        ("step-1\n", Pointing.RIGHT),
        ("./step-1/", Pointing.RIGHT),
        ("step-9", Pointing.OTHER_GENERATION),
        ("step-10", Pointing.NOTHING_THERE),
        ("../step-1", Pointing.LEADS_OUT),
        ("/etc", Pointing.LEADS_OUT),
        ("", Pointing.LEADS_OUT),
        ("a\0b", Pointing.LEADS_OUT),
    ],
)
def test_a_pointer_is_reported_and_not_followed(root: Path, text: str, pointing: Pointing) -> None:
    (root / "latest").write_text(text)
    selection = manifest.select(root)
    assert chosen(selection) == "step-1"
    assert [pointer.pointing for pointer in selection.pointers] == [pointing]


def test_a_pointer_by_its_whole_path(root: Path) -> None:
    (root / "latest").write_text(str(root / "step-1"))
    assert [p.pointing for p in manifest.select(root).pointers] == [Pointing.RIGHT]


def test_a_pointer_that_is_a_link(root: Path) -> None:
    (root / "latest").symlink_to("step-9")
    (pointer,) = manifest.select(root).pointers
    assert (pointer.names, pointer.pointing) == ("step-9", Pointing.OTHER_GENERATION)


def test_a_pointer_that_is_no_text(root: Path) -> None:
    (root / "latest").write_bytes(b"\xff")
    assert [p.pointing for p in manifest.select(root).pointers] == [Pointing.UNREADABLE]


@pytest.mark.parametrize("name", ["iter_0000400", "global_step_400"])
def test_the_pointer_of_megatron_and_of_bytecheckpoint(root: Path, name: str) -> None:
    generation(root, name, 400)
    (root / "latest_checkpointed_iteration.txt").write_text("400")
    assert [p.pointing for p in manifest.select(root).pointers] == [Pointing.RIGHT]


def test_a_pointer_further_down(tmp_path: Path) -> None:
    generation(tmp_path / "run", "step-1", 1)
    (tmp_path / "run/latest").write_text("step-1")
    assert [p.pointing for p in manifest.select(tmp_path).pointers] == [Pointing.RIGHT]
