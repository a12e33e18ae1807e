"""From a recorded save to states on disk, and from those to further launches of the same run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import interrupt, store
from ckptdrill import run as run_module
from ckptdrill.errors import UserError
from ckptdrill.journal import StepState
from ckptdrill.launchers import Mode
from ckptdrill.model import Checkpoint, Claim, Fault, FaultKind, Plan, Replay, Role
from ckptdrill.step import Setting, describe, out_of, prepare
from ckptdrill.store import RunFolder
from tests import test_run
from tests.test_run import ONE, SHARED, FakeMachine, carry_out, matrix

machine = test_run.machine
CELL = "fsdp1-to-fsdp1.interrupted-save"
OLD, NEW = "old bytes", "new bytes!"


def plan(confirm: int = 1, kinds: tuple[FaultKind, ...] = (FaultKind.KILL,)) -> Plan:
    whole = SHARED.continues(test_run.cell(ONE, ONE, "interrupted-save"))
    recorded = replace(whole.source, id="record.x", role=Role.INTERRUPTED, stop_step=4)
    twin = SHARED.restore(Checkpoint("record.x", 4), ONE, "default", "restore.x.undisturbed")
    step = Replay("replay.x", recorded, replace(recorded, id="again.x"), kinds, confirm)
    return replace(whole, claim=Claim.KEEPS_A_GENERATION, restore=twin, replay=step)


def replay_of(of: Plan) -> Replay:
    assert of.replay is not None
    return of.replay


# --------------------------------------------------------------------------------------------------
# A recorded save


def recorded(tmp_path: Path, **changes: Any) -> tuple[Setting, Plan]:
    """Two recordings of one rank that saves a file over an old one, through a temporary name."""
    chosen = plan()
    run = RunFolder(tmp_path / "run")
    setting = Setting(matrix(), run, {step.id: step for step in chosen.steps})
    for launch_id in ("record.x", "again.x"):
        work, folder = run.work(launch_id), run.launch(launch_id)
        (work / "out" / "step-4").mkdir(parents=True)
        (work / "kept").mkdir()
        (work / "kept" / "rank0.1").write_text(OLD)
        (work / "out" / "step-4" / "state").write_text(changes.get(launch_id, NEW))
        folder.mkdir(parents=True)
        for number, event in enumerate(_events(changes.get("size", len(NEW)))):
            line = {"fact": "file_event", "rank": 0, "step": 4, "at_ns": number, **event}
            store.append_line(folder / "rank0.jsonl", line)
    return setting, chosen


def _events(size: int) -> list[dict[str, Any]]:
    state, beside = "step-4/state", "step-4/state.tmp"
    return [
        {"n": None, "op": "mkdir", "path": "step-4"},
        {"n": None, "op": "open", "path": state, "truncates": True},
        {"n": None, "op": "saved", "path": None, "sizes": {state: len(OLD)}},
        {"n": 0, "op": "open", "path": beside, "truncates": True},
        {"n": 1, "op": "rename", "path": beside, "target": state, "sizes": {beside: size}}
        | {"kept": "rank0.1"},
        {"n": 2, "op": "saved", "path": None},
    ]


def replayed(setting: Setting, of: Plan) -> dict[str, Any]:
    interrupt.replay(setting, replay_of(of))
    content: dict[str, Any] = store.read_json(setting.run.replay("replay.x"))
    return content


def test_every_point_has_its_state_on_disk(tmp_path: Path) -> None:
    setting, of = recorded(tmp_path)
    record = replayed(setting, of)
    left = {}
    for point in record["points"]:
        folder = setting.run.work("replay.x") / "states" / point["state"] / "step-4"
        left[point["id"]] = {path.name: path.read_text() for path in folder.iterdir()}
    assert left["rank0.event0.before"] == {"state": OLD}
    assert left["rank0.event1.unwritten"] == {"state": OLD, "state.tmp": ""}
    assert left["rank0.event1.torn"] == {"state": OLD, "state.tmp": NEW[:5]}
    assert left["rank0.event1.before"] == {"state": OLD, "state.tmp": NEW}
    assert left["rank0.event2.before"] == {"state": NEW}
    assert len(record["states"]) == 5
    assert record["unexplained"] is record["unrepeated"] is None
    assert record["varying"] == []


def test_a_file_that_no_event_explains_is_told(tmp_path: Path) -> None:
    setting, of = recorded(tmp_path)
    (setting.run.work("record.x") / "out" / "written-by-a-stranger").write_text("x")
    assert "written-by-a-stranger has 1 bytes on disk" in replayed(setting, of)["unexplained"]


def test_a_file_that_two_saves_write_differently_varies_under_both_its_names(
    tmp_path: Path,
) -> None:
    setting, of = recorded(tmp_path, **{"again.x": NEW.upper()})
    assert replayed(setting, of)["varying"] == ["step-4/state", "step-4/state.tmp"]


def test_a_save_below_another_folder_cannot_be_interrupted(tmp_path: Path) -> None:
    setting, of = recorded(tmp_path)
    facts = setting.run.launch("record.x") / "rank0.jsonl"
    facts.write_text(facts.read_text().replace('"n": ', '"n": null, "m": '))
    with pytest.raises(UserError, match="no file event was seen"):
        interrupt.replay(setting, replay_of(of))


def test_the_launches_that_follow(tmp_path: Path) -> None:
    setting, of = recorded(tmp_path)
    record = replayed(setting, of)
    asked = interrupt.launches(of, record, in_place=False)
    restores = [launch for launch in asked if launch.role is Role.RESTORE]
    assert len(restores) == len(record["states"])
    for launch in restores:
        assert launch.restores is not None
        assert launch.restores.step == 4
        assert launch.stop_step == 8
        assert "replay.x" in launch.after
    (real,) = (launch for launch in asked if launch.fault is not None)
    assert real.after == ("replay.x",)
    assert interrupt.launches(of, record, in_place=False) == asked


def test_a_job_that_finds_its_checkpoint_is_given_the_whole_state(tmp_path: Path) -> None:
    setting, of = recorded(tmp_path)
    given = matrix(test_run.job(resume_args=("--auto-resume",)))
    setting = replace(setting, matrix=given)
    record = replayed(setting, of)
    asked = interrupt.launches(of, record, in_place=True)
    setting = replace(setting, steps={**setting.steps, **{each.id: each for each in asked}})
    torn = next(p["state"] for p in record["points"] if p["moment"] == "torn")
    launch = next(each for each in asked if each.restores and each.restores.state == torn)
    prepare(setting, launch)
    there = {path.name for path in (out_of(setting.run, launch.id) / "step-4").iterdir()}
    assert there == {"state", "state.tmp"}


def test_an_older_checkpoint_lies_where_the_save_goes(tmp_path: Path) -> None:
    setting, of = recorded(tmp_path)
    older = out_of(setting.run, "source.fsdp1") / "step-2"
    older.mkdir(parents=True)
    (older / "state").write_text(OLD)
    launch = replace(replay_of(of).recorded, id="over.x", over=Checkpoint("source.fsdp1", 2))
    assert prepare(setting, launch) in ("copy", "reflink")
    assert (out_of(setting.run, "over.x") / "step-4" / "state").read_text() == OLD


def test_only_a_recording_is_told_to_record(tmp_path: Path) -> None:
    setting, of = recorded(tmp_path)
    asked = describe(setting, replay_of(of).recorded, "warm")["file_events"]
    assert asked["root"] == str(out_of(setting.run, "record.x"))
    assert asked["step"] == 4
    assert describe(setting, of.source, "warm")["file_events"] is None


# --------------------------------------------------------------------------------------------------
# A run that grows


@pytest.fixture
def two_states(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A replay that finds two states; how often it was made."""
    made: list[str] = []

    def fake(setting: Setting, step: Replay) -> None:
        made.append(step.id)
        for name in ("aa", "bb"):
            folder = setting.run.work(step.id) / "states" / name / "step-4"
            folder.mkdir(parents=True)
            (folder / "shard").write_text(name)
        store.write_json(setting.run.replay(step.id), _record())

    monkeypatch.setattr(run_module.interrupt, "replay", fake)
    return made


def _record() -> dict[str, Any]:
    candidate = {"step": 4, "path": "step-4", "label": "new", "old": 0, "new": 1}
    point = {"scope": "rank", "rank": 0, "op": "open", "path": "x", "moment": "before", "cut": {}}
    return {
        "step": 4,
        "unexplained": None,
        "unrepeated": None,
        "varying": [],
        "points": [
            {**point, "id": f"rank0.event{n}.before", "event": n, "state": name}
            for n, name in enumerate(("aa", "bb"))
        ],
        "states": {
            name: {"files": {}, "candidates": [{**candidate, "digest": name}]}
            for name in ("aa", "bb")
        },
    }


FOLLOWING = {
    f"restore.{CELL}.4-aa",
    f"restore.{CELL}.4-bb",
    "confirm.x.rank0.event0.before",
}


def test_what_a_replay_asks_for_is_run(
    machine: FakeMachine, two_states: list[str], tmp_path: Path
) -> None:
    machine.behaviours["confirm.x.rank0.event0.before"] = test_run.Behaviour(returncode=1)
    run, outcome = carry_out(tmp_path, (plan(),), launcher=Mode.WARM)
    assert outcome.steps.keys() >= FOLLOWING
    assert all(entry.state is StepState.ENDED for entry in outcome.steps.values())
    assert store.read_json(run.launch("confirm.x.rank0.event0.before") / "left.json")
    assert not run.work(f"restore.{CELL}.4-aa").exists()
    scripts = {path.name for path in run.cell(CELL).glob("repro-*.sh")}
    assert scripts == {"repro-rank0.event0.before.sh", "repro-rank0.event1.before.sh"}


def test_a_run_stopped_after_its_replay_goes_on_where_it_was(
    machine: FakeMachine, two_states: list[str], tmp_path: Path
) -> None:
    stop = f"restore.{CELL}.4-bb"

    def interrupted() -> None:
        if stop in machine.running:
            machine.on_poll = lambda: None
            raise KeyboardInterrupt

    machine.on_poll = interrupted
    with pytest.raises(UserError, match="interrupted"):
        carry_out(tmp_path, (plan(),), launcher=Mode.WARM)
    before = list(machine.ended)
    _, outcome = carry_out(tmp_path, (plan(),), launcher=Mode.WARM, resume=True)
    assert outcome.steps.keys() >= FOLLOWING
    assert all(entry.state is StepState.ENDED for entry in outcome.steps.values())
    assert two_states == ["replay.x"]
    done = {"source.fsdp1", "repeat1.fsdp1", "record.x", "again.x"}
    assert done <= set(before)
    assert not done & set(machine.ended[len(before) :])


@pytest.mark.parametrize("kind", [FaultKind.TERMINATE, FaultKind.LEAVE])
def test_what_a_process_leaves_that_may_answer_is_a_state_of_its_own(
    kind: FaultKind, tmp_path: Path
) -> None:
    setting, of = recorded(tmp_path)
    of = replace(of, replay=replace(replay_of(of), kinds=(kind,), confirm=2))
    record = replayed(setting, of)
    asked = interrupt.launches(of, record, in_place=False)
    real = [launch for launch in asked if launch.fault is not None]
    assert len(real) == len(record["points"]) == (1 if kind is FaultKind.LEAVE else 2)
    for launch in real:
        assert launch.fault is not None
        left = out_of(setting.run, launch.id)
        left.mkdir(parents=True)
        (left / "state").write_text(launch.id)
        interrupt.take(setting, launch, left)
        state = setting.run.work("replay.x") / "states" / launch.fault.parameters["state"]
        assert (state / "state").read_text() == launch.id
        restores = [each for each in asked if launch.id in each.after]
        assert [each.restores.step for each in restores if each.restores] == [4]


def test_a_launch_without_a_state_to_take_is_left_alone(tmp_path: Path) -> None:
    setting, of = recorded(tmp_path)
    killed = replace(replay_of(of).recorded, fault=Fault(FaultKind.KILL, 0, 1))
    interrupt.take(setting, killed, tmp_path)
    assert not (setting.run.work("replay.x") / "states").exists()
