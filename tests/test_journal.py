"""What counts after a kill: steps that ended, with all they left and all they were built on."""

import json
from pathlib import Path

import pytest

from ckptdrill import journal
from ckptdrill.errors import UserError
from ckptdrill.journal import Entry, StepState
from ckptdrill.model import Checkpoint, Damage, DamageKind, Launch, Role, Step, Topology
from ckptdrill.store import RunFolder, write_json

SOURCE = Launch("source", Role.SOURCE, Topology("a"), "default", 8)
DAMAGE = Damage("damage", DamageKind.DELETE, Checkpoint("source", 4))
RESTORE = Launch(
    "restore", Role.RESTORE, Topology("a"), "default", 8, Checkpoint("source", 4, "damage")
)
STEPS: dict[str, Step] = {step.id: step for step in (SOURCE, DAMAGE, RESTORE)}
ENDED = Entry(StepState.ENDED)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run in which all three steps have ended."""
    folder = RunFolder(tmp_path)
    for step in STEPS.values():
        folder.work(step.id).mkdir(parents=True)
        record = folder.damage(step.id) if step is DAMAGE else folder.launch(step.id) / "exit.json"
        write_json(record, {})
        journal.record(folder, step.id, StepState.STARTED)
        journal.record(folder, step.id, StepState.ENDED)
    return folder


def test_ended_steps_count(run: RunFolder) -> None:
    assert journal.settle(run, STEPS) == dict.fromkeys(STEPS, ENDED)


@pytest.mark.parametrize(
    "state", [StepState.STARTED, StepState.FAILED, StepState.SKIPPED, StepState.INTERRUPTED]
)
def test_any_other_last_word_means_again(run: RunFolder, state: StepState) -> None:
    journal.record(run, "restore", state)
    assert journal.settle(run, STEPS).keys() == {"source", "damage"}
    assert not run.launch("restore").exists()
    assert not run.work("restore").exists()
    assert run.work("source").exists()


def test_an_end_without_its_record_means_again(run: RunFolder) -> None:
    (run.launch("restore") / "exit.json").unlink()
    assert journal.settle(run, STEPS).keys() == {"source", "damage"}


def test_what_was_built_on_a_lost_step_goes_too(run: RunFolder) -> None:
    run.damage("damage").unlink()
    assert journal.settle(run, STEPS).keys() == {"source"}
    assert not run.launch("restore").exists()


def test_a_torn_last_line_is_as_if_it_were_not_there(run: RunFolder) -> None:
    whole = run.journal.read_text()
    run.journal.write_text(whole + '{"step": "restore", "sta')
    assert journal.settle(run, STEPS) == dict.fromkeys(STEPS, ENDED)
    journal.record(run, "restore", StepState.STARTED)
    assert journal.replay(run)["restore"].state is StepState.STARTED


def test_lines_say_when_and_why(run: RunFolder) -> None:
    journal.record(run, "restore", StepState.SKIPPED, "source: lost")
    line = json.loads(run.journal.read_text().splitlines()[-1])
    assert line.pop("t") > 0
    assert line == {"step": "restore", "state": "skipped", "reason": "source: lost"}


@pytest.mark.parametrize(
    ("entry", "lost"),
    [
        (Entry(StepState.ENDED), None),
        (Entry(StepState.ENDED, "ended with exit code 1"), "ended with exit code 1"),
        (Entry(StepState.FAILED, "could not be done"), "could not be done"),
        (Entry(StepState.INTERRUPTED), "interrupted"),
    ],
)
def test_only_a_good_end_can_be_built_on(entry: Entry, lost: str | None) -> None:
    assert entry.lost == lost


def test_the_lock_is_let_go(run: RunFolder) -> None:
    with journal.locked(run), pytest.raises(UserError), journal.locked(run):
        pass
    with journal.locked(run):
        pass
