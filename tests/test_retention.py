"""Old runs make room, and nothing is lost by it: evidence, files of other people, the record."""

import errno
import os
from pathlib import Path

import pytest

from ckptdrill import history, journal, retention, store
from ckptdrill.errors import UserError
from ckptdrill.model import Reason
from ckptdrill.retention import Limits
from ckptdrill.store import RunFolder
from tests.stored_runs import FIRST_S, NIGHT_S, night

HELD, DIVERGED, NOT_RUN = Reason.HELD, Reason.DIVERGED, Reason.NOT_RUN
LATER_S = FIRST_S + 30 * NIGHT_S


def cleared(folder: Path, runs: int = 1, days: float | None = None) -> list[str]:
    past = history.read_all(folder)
    return list(retention.make_room(folder, past, Limits(runs, days), LATER_S))


def left(folder: Path) -> int:
    return len([path for path in folder.iterdir() if path.is_dir()])


def test_the_newest_runs_stay(tmp_path: Path) -> None:
    roots = [night(tmp_path, number, {"a": HELD}) for number in range(5)]
    said = cleared(tmp_path, 2)
    assert [root.exists() for root in roots] == [False, False, False, True, True]
    assert len(said) == 3
    assert len(history.read_all(tmp_path)) == 5


def test_a_young_run_stays_when_days_are_given(tmp_path: Path) -> None:
    roots = [night(tmp_path, number, {"a": HELD}) for number in (1, 20, 29)]
    cleared(tmp_path, 1, 14)
    assert [root.exists() for root in roots] == [False, True, True]


def test_a_run_dated_in_the_future_has_no_age(tmp_path: Path) -> None:
    future = night(tmp_path, 99, {"a": HELD})
    night(tmp_path, 1, {"a": HELD}, name="2027-01-01T00-00-00Z")
    cleared(tmp_path, 1, 14)
    assert future.exists()


@pytest.mark.parametrize("newer", [NOT_RUN, DIVERGED])
def test_the_newest_validated_run_stays(tmp_path: Path, newer: Reason) -> None:
    roots = [night(tmp_path, 0, {"a": HELD}), night(tmp_path, 1, {"a": HELD})]
    roots += [night(tmp_path, number, {"a": newer}) for number in (2, 3, 4)]
    cleared(tmp_path)
    assert [root.exists() for root in roots] == [False, True, False, False, True]


def test_the_newest_evidence_of_each_cell_stays(tmp_path: Path) -> None:
    roots = [
        night(tmp_path, 0, {"a": DIVERGED, "b": DIVERGED}),
        night(tmp_path, 1, {"a": DIVERGED, "b": NOT_RUN}),
        night(tmp_path, 2, {"a": DIVERGED, "b": NOT_RUN}),
    ]
    cleared(tmp_path)
    assert [root.exists() for root in roots] == [True, False, True]


def test_a_run_that_was_begun_by_hand_stays(tmp_path: Path) -> None:
    night(tmp_path, 0, {"a": HELD}, nightly=False)
    night(tmp_path, 1, {"a": HELD})
    assert cleared(tmp_path) == []
    assert left(tmp_path) == 2


@pytest.mark.parametrize("name", ["notes.txt", "mine/notes.txt", "launches/source/notes.txt"])
def test_a_run_with_a_file_of_somebody_else_stays(tmp_path: Path, name: str) -> None:
    root = night(tmp_path, 0, {"a": HELD})
    store.write_manifest(root)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("keep this")
    night(tmp_path, 1, {"a": HELD})
    (said,) = cleared(tmp_path)
    assert f"{name.partition('/')[0]}" in said
    assert (root / name).exists()
    (root / name).unlink()
    if name == "mine/notes.txt":
        (root / "mine").rmdir()
    cleared(tmp_path)
    assert not root.exists()


def test_only_the_newest_run_keeps_its_checkpoints(tmp_path: Path) -> None:
    others = ({"nightly": False}, {"keep": True}, {"status": "ran"}, {}, {})
    roots = [night(tmp_path, n, {"a": DIVERGED}, **about) for n, about in enumerate(others)]
    for root in roots:
        (root / "work" / "source").mkdir(parents=True)
    cleared(tmp_path, 9)
    assert [(root / "work").exists() for root in roots] == [True, True, True, False, True]
    assert [history.read(root).by_cell["a"].executed for root in roots] == [True] * 5


def test_a_run_that_a_process_holds_stays(tmp_path: Path) -> None:
    root = night(tmp_path, 0, {"a": HELD})
    night(tmp_path, 1, {"a": HELD})
    with journal.locked(RunFolder(root)):
        (said,) = cleared(tmp_path)
    assert "another ckptdrill process" in said
    assert root.exists()


def test_links_and_other_folders_are_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "data").write_text("precious")
    folder = tmp_path / "quick"
    for number in (1, 2, 3):
        night(folder, number, {"a": HELD})
    (folder / "2020-01-01T00-00-00Z").symlink_to(target)
    (folder / ".2020-01-01T00-00-00Z.1.removed").symlink_to(target)
    (folder / "2020-01-02T00-00-00Z.backup").mkdir()
    cleared(folder)
    assert (target / "data").read_text() == "precious"
    assert (folder / "2020-01-02T00-00-00Z.backup").exists()


def test_a_removal_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    root = night(tmp_path, 0, {"a": HELD})
    night(tmp_path, 1, {"a": HELD})
    root.rename(tmp_path / f".{root.name}.17.removed")
    cleared(tmp_path)
    assert left(tmp_path) == 1


def test_an_empty_folder_of_a_run_goes(tmp_path: Path) -> None:
    kept = night(tmp_path, 1, {"a": HELD})
    (tmp_path / "2026-03-09T00-00-00Z").mkdir()
    cleared(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [kept]


def test_on_a_full_disk_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run found must be on disk elsewhere before its folder goes."""
    roots = [night(tmp_path, number, {"a": HELD}) for number in range(3)]

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(UserError, match="cannot write"):
            cleared(tmp_path)
    assert all(root.exists() for root in roots)
    cleared(tmp_path)
    assert len(history.read_all(tmp_path)) == 3


def test_a_run_may_go_whatever_kinds_of_step_it_had(tmp_path: Path) -> None:
    roots = [night(tmp_path, number, {"a": HELD}) for number in range(2)]
    run = RunFolder(roots[0])
    for path in (run.conversion("c"), run.damage("d"), run.replay("r"), run.launch("l") / "x"):
        store.write_json(path, {})
    store.write_manifest(run.root)
    cleared(tmp_path, 1)
    assert [root.exists() for root in roots] == [False, True]
