"""Carrying out plans, with launches that are faked down to the files a real one leaves behind.

What matters here is what a run does around its launches: who starts when and how, what is written
before what, and that a run which was stopped anywhere ends as if it had not been.
"""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import drill, journal, store
from ckptdrill import inflict as inflict_module
from ckptdrill import run as run_module
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.journal import StepState
from ckptdrill.launch import local
from ckptdrill.launchers import Mode
from ckptdrill.matrix import Matrix
from ckptdrill.model import (
    Cell,
    Claim,
    Damage,
    DamageKind,
    Environment,
    Expectation,
    Fault,
    FaultKind,
    Job,
    MemoryTier,
    Plan,
    Policy,
    Reason,
    Repro,
    Tolerance,
    Topology,
    VerdictWord,
)
from ckptdrill.plan import SharedLaunches
from ckptdrill.progress import Event
from ckptdrill.run import Options, Outcome, execute, prune
from ckptdrill.schedule import Capacity
from ckptdrill.store import RunFolder
from tests.launch.test_cage import host_names_allowed

TWO, FOUR, ONE = (Topology(f"fsdp{n}", dp_shard=n) for n in (2, 4, 1))
SHARED = SharedLaunches(restore_step=4, saves=(4,), end_step=8, repeats=1)


# --------------------------------------------------------------------------------------------------
# A machine on which launches take two looks each


@dataclass
class Behaviour:
    """What a faked launch does."""

    returncode: int = 0
    saves: bool = True
    loss: float = 1.0
    touches: Path | None = None
    last_fact: dict[str, Any] | None = None
    error: str | None = None


@dataclass
class FakeMachine:
    """Starts launches that only write files, and remembers how."""

    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    started: list[tuple[str, str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    most_ranks: int = 0
    running: dict[str, int] = field(default_factory=dict)
    on_poll: Callable[[], None] = lambda: None
    importing_polls: int = 0

    def start(self, launch: Mapping[str, Any], launcher: str) -> "FakeRunning":
        folder = Path(launch["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        content = {**launch, "launcher": launcher}
        store.write_json(folder / "launch.json", content)
        self.started.append((launch["id"], launcher))
        self.running[launch["id"]] = launch["world_size"]
        self.most_ranks = max(self.most_ranks, sum(self.running.values()))
        return FakeRunning(self, content, folder)

    @property
    def launchers(self) -> dict[str, str]:
        return dict(self.started)


@dataclass
class FakeRunning:
    machine: FakeMachine
    launch: Mapping[str, Any]
    folder: Path
    looks: int = 0
    terminated: bool = False

    def poll(self) -> bool:
        self.machine.on_poll()
        self.looks += 1
        if self.looks < 2:
            return False
        if self.launch["id"] in self.machine.running:
            self._finish()
        return True

    def terminate(self) -> None:
        self.terminated = True

    def _finish(self) -> None:
        behaviour = self.machine.behaviours.get(self.launch["id"], Behaviour())
        del self.machine.running[self.launch["id"]]
        self.machine.ended.append(self.launch["id"])
        for rank in range(self.launch["world_size"]):
            fact = {"fact": "stepped", "t": 1.5, "rank": rank, "step": 1, "loss": behaviour.loss}
            lines = [fact, {**fact, **behaviour.last_fact}] if behaviour.last_fact else [fact]
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            (self.folder / f"rank{rank}.jsonl").write_text(text)
        if behaviour.saves and not self.terminated:
            self._save()
        if behaviour.touches is not None:
            behaviour.touches.write_text("overwritten")
        code = -15 if self.terminated else behaviour.returncode
        ended = {"returncode": code, "wall_s": 0.1, "error": behaviour.error}
        store.write_json(self.folder / "exit.json", ended)

    def _save(self) -> None:
        out = Path(self.launch["args"][self.launch["args"].index("--out") + 1])
        last = self.launch["first_step"] + self.launch["stop_step"]
        if "--memory" in self.launch["args"]:
            memory = Path(self.launch["args"][self.launch["args"].index("--memory") + 1])
            for rank in (0, 1):
                (memory / f"rank{rank}.pt").write_text(f"{last} of {rank}")
        for step in (4, 8):
            if self.launch["first_step"] < step <= last:
                (out / f"step-{step}").mkdir()
                (out / f"step-{step}" / "shard").write_text(f"state of {step}")
                (out / "latest").write_text(f"step-{step}\n")


class FakeWarmParent:
    machine: FakeMachine

    def __init__(self, python: str, pack: Path, control_dir: Path, env: Mapping[str, str]) -> None:
        self.control_dir, self.env, self.closed = control_dir, env, False
        self._polls_left = self.machine.importing_polls
        control_dir.mkdir(parents=True, exist_ok=True)

    def ready(self, timeout_s: float) -> bool:
        self._polls_left -= 1
        return self._polls_left < 0

    def refusal(self) -> str | None:
        return None

    def differences(self, launch: Mapping[str, Any]) -> list[str]:
        return ["HF_HOME"] if launch["env"].get("HF_HOME") == "special" else []

    def start(self, launch: Mapping[str, Any]) -> FakeRunning:
        return self.machine.start(launch, "warm")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    fake = FakeMachine()
    FakeWarmParent.machine = fake
    monkeypatch.setattr(local, "start_cold", lambda launch, pack: fake.start(launch, "torchrun"))
    monkeypatch.setattr(local, "WarmParent", FakeWarmParent)
    monkeypatch.setattr(run_module, "_POLL_S", 0.0)
    return fake


@pytest.fixture(autouse=True)
def _plain_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(damage: Damage, checkpoint: Path, _: Path | None = None) -> dict[str, Any]:
        (checkpoint / "shard").write_text("damaged")
        return {"id": damage.id, "fired": True}

    monkeypatch.setattr(inflict_module.damage_kinds, "apply", apply)


def job(**changes: Any) -> Job:
    plain = Job(
        program="/jobs/train.py",
        module=None,
        args=("--out", "{out}", "--dp", "{dp}"),
        resume_args=("--resume", "{resume}"),
        checkpoint="{out}/step-{step}",
        saves=(4, 8),
        restore_step=4,
        window=4,
        cwd="/",
        env={"SEED": "7"},
    )
    return replace(plain, **changes)


def matrix(of: Job | None = None) -> Matrix:
    return Matrix(
        name="quick",
        path=Path("quick.yaml"),
        text=b"",
        job=of or job(),
        environments={"default": Environment("default", "/usr/bin/python3")},
        topologies={t.name: t for t in (ONE, TWO, FOUR)},
        tolerance=Tolerance(),
        policy=Policy(),
        repeats=1,
        cells=(),
    )


def cell(source: Topology, target: Topology, drill: str) -> Cell:
    name = f"{source.name}-to-{target.name}.{drill}"
    return Cell(name, source, "default", target, "default", drill)


def continues(source: Topology, target: Topology, shared: SharedLaunches = SHARED) -> Plan:
    return shared.continues(cell(source, target, "dp-change"))


def damaged(source: Topology) -> Plan:
    address = cell(source, source, "corrupt-shard")
    damage = Damage("damage.a", DamageKind.BIT_FLIP, SHARED.checkpoint_of(address))
    return SHARED.continues(address, damage=damage, claim=Claim.DETECTS_DAMAGE)


def plans() -> tuple[Plan, ...]:
    return (continues(TWO, TWO), continues(TWO, ONE), damaged(TWO))


def carry_out(
    tmp_path: Path,
    of: tuple[Plan, ...] | None = None,
    given: Matrix | None = None,
    **options: Any,
) -> tuple[RunFolder, Outcome]:
    run = RunFolder(tmp_path / "run")
    run.root.mkdir(exist_ok=True, parents=True)
    chosen = Options(**{"capacity": Capacity(4), **options})
    return run, execute(given or matrix(), of or plans(), run, chosen)


def launch_json(run: RunFolder, launch_id: str) -> dict[str, Any]:
    content: dict[str, Any] = store.read_json(run.launch(launch_id) / "launch.json")
    return content


RESTORE_ONE = "restore.fsdp2-to-fsdp1.dp-change"
RESTORE_DAMAGED = "restore.fsdp2-to-fsdp2.corrupt-shard"
ALL_LAUNCHES = {
    "source.fsdp2",
    "repeat1.fsdp2",
    "restore.fsdp2.baseline",
    "control.fsdp1",
    RESTORE_ONE,
    RESTORE_DAMAGED,
}


# --------------------------------------------------------------------------------------------------
# What a run leaves


def test_every_step_runs_once_and_is_recorded(machine: FakeMachine, tmp_path: Path) -> None:
    run, outcome = carry_out(tmp_path)
    assert sorted(step_id for step_id, _ in machine.started) == sorted(ALL_LAUNCHES)
    assert outcome.steps.keys() == ALL_LAUNCHES | {"damage.a"}
    assert all(entry == journal.Entry(StepState.ENDED) for entry in outcome.steps.values())
    assert outcome.code is ExitCode.AS_EXPECTED
    written = store.read_json(run.run_json)
    assert (written["status"], written["source_unchanged"]) == ("ran", True)


def test_launches_of_two_ranks_run_side_by_side(machine: FakeMachine, tmp_path: Path) -> None:
    carry_out(tmp_path, launcher=Mode.TORCHRUN)
    assert machine.most_ranks == 4


def test_cells_are_on_disk_before_anything_starts(machine: FakeMachine, tmp_path: Path) -> None:
    seen: list[list[str]] = []
    cells = tmp_path / "run" / "cells"
    machine.on_poll = lambda: seen.append(sorted(path.name for path in cells.glob("*/*")))
    carry_out(tmp_path)
    assert seen[0] == sorted(["plan.json", "repro.sh"] * 3)


def test_the_observer_is_copied_without_its_cache(machine: FakeMachine, tmp_path: Path) -> None:
    run, _ = carry_out(tmp_path)
    names = {path.name for path in (run.observer_pack / local.PACK_NAME).iterdir()}
    assert {"__main__.py", "cage.py", "warm.py"} <= names
    assert "__pycache__" not in names


def test_a_restore_gets_a_private_copy_and_local_steps(
    machine: FakeMachine, tmp_path: Path
) -> None:
    run, _ = carry_out(tmp_path)
    source, restore = launch_json(run, "source.fsdp2"), launch_json(run, RESTORE_ONE)
    copy = run.work(RESTORE_ONE) / "restore" / "step-4"
    out = run.work(RESTORE_ONE) / "out"
    assert (copy / "shard").read_text() == "state of 4"
    assert restore["args"] == ["--out", str(out), "--dp", "1", "--resume", str(copy)]
    assert (restore["first_step"], restore["stop_step"]) == (4, 4)
    assert restore["sample_steps"] == [0, 1, 4]
    assert source["args"] == ["--out", str(run.work("source.fsdp2") / "out"), "--dp", "2"]
    assert (source["first_step"], source["stop_step"]) == (0, 8)
    assert source["sample_steps"] == [4, 5, 6, 7, 8]
    assert restore["env"]["SEED"] == "7"
    assert restore["env"]["CKPTDRILL_LAUNCH"] == str(run.launch(RESTORE_ONE) / "launch.json")


def test_a_damaged_restore_reads_the_damaged_copy(machine: FakeMachine, tmp_path: Path) -> None:
    run, _ = carry_out(tmp_path)
    assert (run.work(RESTORE_DAMAGED) / "restore/step-4/shard").read_text() == "damaged"
    assert (run.work("source.fsdp2") / "out/step-4/shard").read_text() == "state of 4"
    assert store.read_json(run.damage("damage.a"))["fired"] is True


def test_a_job_that_finds_its_own_checkpoint_is_given_it_in_place(
    machine: FakeMachine, tmp_path: Path
) -> None:
    given = matrix(job(resume_args=("--auto-resume",)))
    run, _ = carry_out(tmp_path, given=given)
    out = run.work("restore.fsdp2.baseline") / "out"
    assert (out / "step-4" / "shard").read_text() == "state of 4"
    assert "--auto-resume" in launch_json(run, "restore.fsdp2.baseline")["args"]
    # The source has gone on to step 8; when step 4 was the newest, the pointer said so.
    pointer = run.work("restore.fsdp2.baseline") / "pointers" / "latest"
    assert pointer.read_text() == "step-4\n"


# --------------------------------------------------------------------------------------------------
# Guards, and pointers that lie

LATER = replace(SHARED, restore_step=8, end_step=12)


def faulty(kind: DamageKind, **parameters: Any) -> Plan:
    address = cell(TWO, TWO, "fault")
    damage = Damage("damage.a", kind, LATER.checkpoint_of(address), parameters)
    return LATER.continues(address, damage=damage, claim=Claim.DETECTS_DAMAGE)


FAULTY = "restore.fsdp2-to-fsdp2.fault"


def test_a_guard_restores_the_newest_older_step(machine: FakeMachine, tmp_path: Path) -> None:
    plan = faulty(DamageKind.BIT_FLIP, guard="manifest")
    run, outcome = carry_out(tmp_path, (plan,), matrix(job(restore_step=8)))
    record = store.read_json(run.damage("damage.a"))
    assert record["manifest"]["problems"] == [{"kind": "size-differs", "path": "shard"}]
    assert (record["guarded_by"], record["selected_step"]) == ("manifest", 4)
    assert record["passed_over"] == ["step-8: size-differs: shard: recorded 10 bytes, found 7"]
    launch = launch_json(run, FAULTY)
    copy = run.work(FAULTY) / "restore" / "step-4"
    assert launch["args"][-1] == str(copy)
    assert (copy / "shard").read_text() == "state of 4"
    assert (launch["first_step"], launch["stop_step"]) == (4, 8)
    assert outcome.source_changes == ()
    script = (run.cell(plan.cell.id) / "repro.sh").read_text()
    assert f"SOURCE={run.work('damage.a')}/step-4\n" in script
    assert "A guard chose it in place of step 8" in script


def test_without_a_guard_the_damaged_step_is_restored_and_older_ones_lie_beside_it(
    machine: FakeMachine, tmp_path: Path
) -> None:
    plan = faulty(DamageKind.BIT_FLIP)
    run, _ = carry_out(tmp_path, (plan,), matrix(job(restore_step=8)))
    record = store.read_json(run.damage("damage.a"))
    assert record["manifest"]["problems"]
    assert "selected_step" not in record
    assert launch_json(run, FAULTY)["first_step"] == 8
    restore = run.work(FAULTY) / "restore"
    shards = {path.name: (path / "shard").read_text() for path in restore.iterdir()}
    assert shards == {"step-8": "damaged", "step-4": "state of 4"}
    script = (run.cell(plan.cell.id) / "repro.sh").read_text()
    assert "/out/step-4" in script


def test_a_guard_leaves_only_what_is_whole_to_a_job_that_looks_itself(
    machine: FakeMachine, tmp_path: Path
) -> None:
    plan = faulty(DamageKind.BIT_FLIP, guard="manifest")
    machine.behaviours[FAULTY] = Behaviour(saves=False)
    given = matrix(job(resume_args=("--auto",), restore_step=8))
    run, _ = carry_out(tmp_path, (plan,), given)
    out = run.work(FAULTY) / "out"
    assert sorted(path.name for path in out.iterdir()) == ["latest", "step-4"]
    assert (out / "step-4" / "shard").read_text() == "state of 4"
    assert (out / "latest").read_text() == "step-4\n"


def test_a_checkpoint_of_one_file_may_be_gone_when_the_job_starts(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(damage: Damage, checkpoint: Path, _: Path | None) -> dict[str, Any]:
        checkpoint.unlink()
        return {"id": damage.id, "fired": True}

    monkeypatch.setattr(inflict_module.damage_kinds, "apply", remove)
    plan = faulty(DamageKind.DELETE)
    given = matrix(job(restore_step=8, checkpoint="{out}/step-{step}/shard"))
    run, outcome = carry_out(tmp_path, (plan,), given)
    record = store.read_json(run.damage("damage.a"))
    assert record["manifest"]["problems"] == [{"kind": "missing", "path": "shard"}]
    assert outcome.steps[FAULTY].state is StepState.ENDED
    assert not (run.work(FAULTY) / "restore" / "shard").exists()


def test_a_guard_that_finds_nothing_restores_what_was_planned(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchanged = {"id": "damage.a", "fired": False}
    monkeypatch.setattr(inflict_module.damage_kinds, "apply", lambda *_: dict(unchanged))
    plan = faulty(DamageKind.BIT_FLIP, guard="manifest")
    run, _ = carry_out(tmp_path, (plan,), matrix(job(restore_step=8)))
    assert store.read_json(run.damage("damage.a"))["selected_step"] is None
    assert launch_json(run, FAULTY)["first_step"] == 8


def test_a_guard_without_an_older_step_stops_the_launch(
    machine: FakeMachine, tmp_path: Path
) -> None:
    plan = faulty(DamageKind.BIT_FLIP, guard="manifest")
    run, outcome = carry_out(tmp_path, (plan,), matrix(job(restore_step=8, saves=(8,))))
    record = store.read_json(run.damage("damage.a"))
    assert (record["guard_refused"], record["selected_step"]) == (True, None)
    assert record["manifest"]["problems"] == [{"kind": "size-differs", "path": "shard"}]
    assert outcome.steps["damage.a"].state is StepState.ENDED
    assert outcome.steps[FAULTY].state is StepState.SKIPPED
    assert "no older checkpoint is whole" in str(outcome.steps[FAULTY].reason)
    assert FAULTY not in machine.launchers


@pytest.mark.parametrize(
    ("lie", "named", "said"),
    [
        ("missing", 12, "step-12\n"),
        ("stale", 4, "step-4\n"),
        ("empty", None, ""),
        ("removed", None, None),
    ],
)
def test_a_lying_pointer_is_what_the_job_finds(
    machine: FakeMachine, tmp_path: Path, lie: str, named: int | None, said: str | None
) -> None:
    plan = faulty(DamageKind.POINTER, lie=lie, named_step=named)
    given = matrix(job(resume_args=("--auto",), restore_step=8))
    run, outcome = carry_out(tmp_path, (plan,), given)
    record = store.read_json(run.damage("damage.a"))
    assert record["fired"]
    assert record["pointers"][0]["before"] == "step-8"
    kept = run.work(FAULTY) / "pointers" / "latest"
    assert (kept.read_text() if kept.exists() else None) == said
    out = run.work(FAULTY) / "out"
    assert {"step-8", "step-4"} <= {path.name for path in out.iterdir()}
    assert outcome.source_changes == ()
    twin = run.work("restore.fsdp2.baseline") / "pointers" / "latest"
    assert twin.read_text() == "step-8\n"


def test_an_uncommitted_step_lies_where_the_pointer_says(
    machine: FakeMachine, tmp_path: Path
) -> None:
    early = replace(SHARED, restore_step=4)
    address = cell(TWO, TWO, "fault")
    about = {"lie": "uncommitted", "named_step": 8}
    damage = Damage("damage.a", DamageKind.POINTER, early.checkpoint_of(address), about)
    plan = early.continues(address, damage=damage, claim=Claim.DETECTS_DAMAGE)
    machine.behaviours[FAULTY] = Behaviour(saves=False)
    run, _ = carry_out(tmp_path, (plan,), matrix(job(resume_args=("--auto",))))
    (torn,) = store.read_json(run.damage("damage.a"))["torn"]
    assert torn["fired"]
    out = run.work(FAULTY) / "out"
    assert (out / "step-8" / "shard").read_text() == "damaged"
    assert (out / "step-4" / "shard").read_text() == "state of 4"
    assert (run.work(FAULTY) / "pointers" / "latest").read_text() == "step-8\n"
    assert (run.work("source.fsdp2") / "out/step-8/shard").read_text() == "state of 8"


def test_a_job_without_a_pointer_cannot_be_lied_to(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflict_module.pointers, "NAMES", ("other*",))
    plan = faulty(DamageKind.POINTER, lie="removed", named_step=None)
    given = matrix(job(resume_args=("--auto",), restore_step=8))
    _, outcome = carry_out(tmp_path, (plan,), given)
    assert "keeps no pointer" in str(outcome.steps["damage.a"].reason)
    assert outcome.steps[FAULTY].state is StepState.SKIPPED


def test_a_run_may_start_from_a_given_checkpoint(machine: FakeMachine, tmp_path: Path) -> None:
    start = tmp_path / "given" / "step-2"
    start.mkdir(parents=True)
    (start / "shard").write_text("given")
    given = matrix(job(start_from=str(start), start_step=2))
    run, outcome = carry_out(tmp_path, given=given)
    source = launch_json(run, "source.fsdp2")
    assert source["args"][-1] == str(run.work("source.fsdp2") / "restore" / "step-2")
    assert (source["first_step"], source["stop_step"]) == (2, 6)
    assert outcome.source_changes == ()


def test_gpus_are_told_to_the_job(machine: FakeMachine, tmp_path: Path) -> None:
    run, _ = carry_out(tmp_path, capacity=Capacity(2, ("4", "5")))
    assert launch_json(run, "source.fsdp2")["env"]["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert launch_json(run, RESTORE_ONE)["env"]["CUDA_VISIBLE_DEVICES"] in ("4", "5")


# --------------------------------------------------------------------------------------------------
# Failures


def test_a_failed_source_costs_its_dependants_only(machine: FakeMachine, tmp_path: Path) -> None:
    machine.behaviours["source.fsdp2"] = Behaviour(returncode=1)
    of = (continues(TWO, ONE), continues(FOUR, FOUR))
    run, outcome = carry_out(tmp_path, of)
    reason = "source.fsdp2: ended with exit code 1"
    assert outcome.steps[RESTORE_ONE] == journal.Entry(StepState.SKIPPED, reason)
    assert outcome.steps["restore.fsdp2.baseline"].reason == reason
    assert outcome.steps["restore.fsdp4.baseline"].state is StepState.ENDED
    assert not run.launch(RESTORE_ONE).exists()
    assert journal.replay(run) == outcome.steps


def test_nobody_waits_for_the_control_of_a_failed_source(
    machine: FakeMachine, tmp_path: Path
) -> None:
    machine.behaviours["source.fsdp2"] = Behaviour(returncode=1)
    _, outcome = carry_out(tmp_path, (continues(TWO, ONE),))
    assert outcome.steps["control.fsdp1"].state is StepState.SKIPPED


def test_a_source_that_saved_nothing_costs_its_restores(
    machine: FakeMachine, tmp_path: Path
) -> None:
    machine.behaviours["source.fsdp2"] = Behaviour(saves=False)
    run, outcome = carry_out(tmp_path)
    path = run.work("source.fsdp2") / "out" / "step-4"
    assert outcome.steps[RESTORE_ONE].reason == (
        f"there is no checkpoint at {path}; the folder is empty"
    )
    assert outcome.steps[RESTORE_DAMAGED].state is StepState.SKIPPED
    assert outcome.steps["control.fsdp1"].state is StepState.ENDED


def test_a_restore_that_fails_is_evidence_and_stops_nothing(
    machine: FakeMachine, tmp_path: Path
) -> None:
    machine.behaviours[RESTORE_ONE] = Behaviour(returncode=1)
    _, outcome = carry_out(tmp_path)
    assert outcome.steps[RESTORE_ONE] == journal.Entry(StepState.ENDED, "ended with exit code 1")
    assert outcome.steps[RESTORE_DAMAGED] == journal.Entry(StepState.ENDED)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        ("cage died", StepState.FAILED),
        ("cage failed: OSError(28)", StepState.FAILED),
        ("terminated", StepState.FAILED),
        ("lingered after every rank had finished", StepState.ENDED),
        (None, StepState.ENDED),
    ],
)
def test_a_launch_whose_cage_was_ended_runs_again(
    machine: FakeMachine, tmp_path: Path, error: str | None, state: StepState
) -> None:
    machine.behaviours[RESTORE_ONE] = Behaviour(error=error)
    _, outcome = carry_out(tmp_path)
    assert outcome.steps[RESTORE_ONE].state is state
    machine.behaviours.clear()
    machine.started.clear()
    carry_out(tmp_path, resume=True)
    assert len(machine.started) == (state is StepState.FAILED)


def test_a_launch_that_cannot_start_stops_nothing(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(launch: Mapping[str, Any], pack: Path) -> FakeRunning:
        if launch["id"] == "control.fsdp1":
            raise PermissionError(errno.EACCES, "Permission denied", "/usr/bin/python3")
        return machine.start(launch, "torchrun")

    monkeypatch.setattr(local, "start_cold", start)
    _, outcome = carry_out(tmp_path, launcher=Mode.TORCHRUN)
    assert outcome.steps["control.fsdp1"].state is StepState.FAILED
    assert "Permission denied" in str(outcome.steps["control.fsdp1"].reason)
    assert outcome.steps[RESTORE_ONE].state is StepState.ENDED


def test_a_damage_that_finds_nothing_skips_its_restore(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(damage: Damage, checkpoint: Path, _: Path | None = None) -> dict[str, Any]:
        raise UserError("no tensor matches 'nothing*'")

    monkeypatch.setattr(inflict_module.damage_kinds, "apply", apply)
    _, outcome = carry_out(tmp_path)
    assert outcome.steps["damage.a"].state is StepState.FAILED
    assert "no tensor matches" in str(outcome.steps[RESTORE_DAMAGED].reason)


@pytest.mark.parametrize("place", ["journal", "copy"])
def test_a_full_disk_ends_the_run_with_the_next_move(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def no_space(*_: Any) -> Any:
        raise full

    if place == "journal":
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: no_space() if _is_journal(fd) else real(fd))
    else:
        monkeypatch.setattr(inflict_module, "private_copy", no_space)
    with pytest.raises(UserError, match="No space left") as caught:
        carry_out(tmp_path)
    assert "--resume" in str(caught.value)


def _is_journal(descriptor: int) -> bool:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith("journal.jsonl")


def test_a_changed_source_voids_the_run(machine: FakeMachine, tmp_path: Path) -> None:
    shard = tmp_path / "run/work/source.fsdp2/out/step-4/shard"
    machine.behaviours[RESTORE_ONE] = Behaviour(touches=shard)
    run, outcome = carry_out(tmp_path)
    assert outcome.code is ExitCode.SOURCE_CHANGED
    assert "shard" in outcome.source_changes[0]
    assert store.read_json(run.run_json)["source_unchanged"] is False


def test_a_changed_start_voids_the_run(machine: FakeMachine, tmp_path: Path) -> None:
    start = tmp_path / "step-2"
    start.mkdir()
    (start / "shard").write_text("given")
    machine.behaviours["control.fsdp1"] = Behaviour(touches=start / "shard")
    given = matrix(job(start_from=str(start), start_step=2))
    _, outcome = carry_out(tmp_path, given=given)
    assert outcome.code is ExitCode.SOURCE_CHANGED


# --------------------------------------------------------------------------------------------------
# Cold and warm


def test_the_source_runs_cold_and_the_rest_warm(machine: FakeMachine, tmp_path: Path) -> None:
    _, outcome = carry_out(tmp_path)
    launchers = machine.launchers
    assert launchers.pop("source.fsdp2") == "torchrun"
    assert set(launchers.values()) == {"warm"}
    assert "same facts" in outcome.launchers["default"]


def test_nothing_is_warm_before_the_repeat_was_compared(
    machine: FakeMachine, tmp_path: Path
) -> None:
    carry_out(tmp_path, capacity=Capacity(100))
    before = {"source.fsdp2", "repeat1.fsdp2"}
    assert {step_id for step_id, _ in machine.started[:2]} == before
    assert set(machine.ended[:2]) == before


def test_a_difference_makes_the_rest_cold(machine: FakeMachine, tmp_path: Path) -> None:
    machine.behaviours["repeat1.fsdp2"] = Behaviour(loss=2.0)
    run, outcome = carry_out(tmp_path)
    cold = {step_id for step_id, launcher in machine.started if launcher == "torchrun"}
    assert cold == ALL_LAUNCHES - {"repeat1.fsdp2"}
    assert "loss is 1.0 cold, 2.0 warm" in outcome.launchers["default"]
    assert store.read_json(run.run_json)["launchers"] == dict(outcome.launchers)


def test_without_repeats_one_warm_look_is_taken_anyway(
    machine: FakeMachine, tmp_path: Path
) -> None:
    shared = replace(SHARED, repeats=0)
    carry_out(tmp_path, (continues(TWO, TWO, shared),))
    assert machine.launchers == {
        "source.fsdp2": "torchrun",
        "warm-check.source.fsdp2": "warm",
        "restore.fsdp2.baseline": "warm",
    }


@pytest.mark.parametrize("mode", [Mode.WARM, Mode.TORCHRUN])
def test_a_launcher_that_was_asked_for_starts_all(
    machine: FakeMachine, tmp_path: Path, mode: Mode
) -> None:
    carry_out(tmp_path, launcher=mode)
    assert set(machine.launchers.values()) == {mode.value}


def test_a_launch_the_parent_cannot_serve_runs_cold(machine: FakeMachine, tmp_path: Path) -> None:
    given = matrix(job(env={"HF_HOME": "special"}))
    _, outcome = carry_out(tmp_path, given=given)
    assert set(machine.launchers.values()) == {"torchrun"}
    assert "did not run warm" in outcome.launchers["default"]


def test_asked_for_warm_and_impossible_is_an_error(machine: FakeMachine, tmp_path: Path) -> None:
    given = matrix(job(env={"HF_HOME": "special"}))
    with pytest.raises(UserError, match="cannot run warm: it needs its own HF_HOME"):
        carry_out(tmp_path, given=given, launcher=Mode.WARM)


def test_warm_launches_wait_for_the_imports(machine: FakeMachine, tmp_path: Path) -> None:
    machine.importing_polls = 20
    carry_out(tmp_path)
    assert machine.launchers["repeat1.fsdp2"] == "warm"
    assert machine.started[0] == ("source.fsdp2", "torchrun")


# --------------------------------------------------------------------------------------------------
# Stopping and going on


class Killed(BaseException):
    """Stands for SIGKILL: nothing is tidied up after it."""


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, bool], None]]:
    """Have the runner die when it has written so many journal lines, perhaps within the next."""
    real = journal.record

    def arm(lines: int, torn: bool) -> None:
        written = 0

        def record(run: RunFolder, *args: Any) -> None:
            nonlocal written
            if written == lines:
                if torn:
                    with run.journal.open("a") as stream:
                        stream.write('{"step": "sour')
                raise Killed
            written += 1
            real(run, *args)

        monkeypatch.setattr(run_module, "record", record)

    yield arm
    monkeypatch.setattr(run_module, "record", real)


def facts_of(run: RunFolder) -> dict[str, str]:
    """All facts and exits by relative path, with the run's own folder cut out."""
    return {
        str(path.relative_to(run.root)): path.read_text().replace(str(run.root), "RUN")
        for path in sorted(run.root.glob("launches/*/*"))
        if path.name != "checkpoints.json"
    }


def test_a_run_killed_at_any_line_of_its_journal_ends_the_same(
    machine: FakeMachine,
    tmp_path: Path,
    killed_after: Callable[[int, bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "whole").mkdir()
    whole, expected = carry_out(tmp_path / "whole")
    lines = len(whole.journal.read_text().splitlines())
    assert lines == 2 * len(expected.steps)
    for number in range(lines):
        root = tmp_path / f"killed{number}"
        root.mkdir()
        killed_after(number, bool(number % 2))
        machine.running.clear()
        with pytest.raises(Killed):
            carry_out(root)
        done = {i for i, e in journal.replay(RunFolder(root / "run")).items() if not e.lost}
        machine.started.clear()
        machine.running.clear()
        monkeypatch.setattr(run_module, "record", journal.record)
        resumed, outcome = carry_out(root, resume=True)
        assert outcome == expected
        assert facts_of(resumed) == facts_of(whole)
        assert not done & {step_id for step_id, _ in machine.started}


@pytest.mark.parametrize("way", ["ctrl-c", "sigterm"])
def test_an_interrupted_run_stops_what_runs_and_goes_on_later(
    machine: FakeMachine, tmp_path: Path, way: str
) -> None:
    def interrupt() -> None:
        machine.on_poll = lambda: None
        if way == "ctrl-c":
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)

    machine.on_poll = interrupt
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match="interrupted: 0 of 7 steps") as caught:
        carry_out(tmp_path)
    assert "--resume" in str(caught.value)
    assert machine.running == {}
    assert signal.getsignal(signal.SIGTERM) == before
    latest = journal.replay(RunFolder(tmp_path / "run"))
    assert {entry.state for entry in latest.values()} == {StepState.INTERRUPTED}
    _, outcome = carry_out(tmp_path, resume=True)
    assert {entry.lost for entry in outcome.steps.values()} == {None}


def test_what_was_built_on_a_lost_launch_runs_again(machine: FakeMachine, tmp_path: Path) -> None:
    run, _ = carry_out(tmp_path)
    journal.remove_tree(run.launch("source.fsdp2"))
    machine.started.clear()
    carry_out(tmp_path, resume=True)
    again = {step_id for step_id, _ in machine.started}
    assert again == {"source.fsdp2", "restore.fsdp2.baseline", RESTORE_ONE, RESTORE_DAMAGED}


def test_a_finished_run_resumed_starts_nothing(machine: FakeMachine, tmp_path: Path) -> None:
    _, first = carry_out(tmp_path)
    machine.started.clear()
    _, second = carry_out(tmp_path, resume=True)
    assert machine.started == []
    assert second == first


def test_another_matrix_cannot_continue_a_run(machine: FakeMachine, tmp_path: Path) -> None:
    carry_out(tmp_path)
    other = (continues(TWO, TWO, replace(SHARED, end_step=12)),)
    with pytest.raises(UserError, match="planned differently"):
        carry_out(tmp_path, other, resume=True)


def test_a_run_is_not_started_twice_by_accident(machine: FakeMachine, tmp_path: Path) -> None:
    carry_out(tmp_path)
    with pytest.raises(UserError, match="has been started before"):
        carry_out(tmp_path)


def test_a_run_has_one_writer(machine: FakeMachine, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    with journal.locked(run), pytest.raises(UserError, match=r"^another ckptdrill process") as held:
        carry_out(tmp_path)
    assert held.value.code is ExitCode.USAGE
    carry_out(tmp_path)


def test_a_run_need_not_be_in_the_main_thread(machine: FakeMachine, tmp_path: Path) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(carry_out(tmp_path)[1]))
    thread.start()
    thread.join()
    assert outcomes[0].code is ExitCode.AS_EXPECTED


# --------------------------------------------------------------------------------------------------
# Full disks


def fails_without_room(message: str, **keys: Any) -> Behaviour:
    crash = {"fact": "crashed", "error": [{"type": "OSError", "message": message}], **keys}
    return Behaviour(returncode=1, saves=False, last_fact=crash)


@pytest.mark.parametrize(
    ("message", "full"),
    [
        ("[Errno 28] No space left on device", True),
        ("PytorchStreamWriter failed writing file data/0: file write failed", True),
        ("[Errno 122] Disk quota exceeded", True),
        ("size mismatch for layer.weight", False),
    ],
)
def test_what_a_full_disk_ended_is_no_evidence_and_runs_again(
    machine: FakeMachine, tmp_path: Path, message: str, full: bool
) -> None:
    machine.behaviours[RESTORE_ONE] = fails_without_room(message)
    _, outcome = carry_out(tmp_path)
    entry = outcome.steps[RESTORE_ONE]
    assert entry.state is (StepState.FAILED if full else StepState.ENDED)
    assert entry.reason == (
        f"the disk was full while it ran: {message}" if full else "ended with exit code 1"
    )
    machine.behaviours.clear()
    machine.started.clear()
    _, outcome = carry_out(tmp_path, resume=True)
    assert [step_id for step_id, _ in machine.started] == [RESTORE_ONE] * full
    assert outcome.steps[RESTORE_ONE].state is StepState.ENDED


def test_a_launch_that_found_no_room_for_facts_runs_again(
    machine: FakeMachine, tmp_path: Path
) -> None:
    machine.behaviours[RESTORE_ONE] = Behaviour(last_fact={"fact": "stopped", "lost": 2})
    machine.behaviours[RESTORE_DAMAGED] = Behaviour(last_fact={"fact": "stopped", "a": {"lost": 2}})
    _, outcome = carry_out(tmp_path)
    reason = "the disk was full while it ran: facts were lost"
    assert outcome.steps[RESTORE_ONE] == journal.Entry(StepState.FAILED, reason)
    assert outcome.steps[RESTORE_DAMAGED].state is StepState.ENDED


def test_a_launch_that_fails_where_no_byte_is_left_is_not_held_against_the_job(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.behaviours[RESTORE_ONE] = Behaviour(returncode=1)
    monkeypatch.setattr(run_module, "_free_bytes", lambda _folder: 1000)
    _, outcome = carry_out(tmp_path)
    reason = "the disk was full while it ran: it ended with exit code 1"
    assert outcome.steps[RESTORE_ONE] == journal.Entry(StepState.FAILED, reason)
    assert outcome.steps[RESTORE_DAMAGED].state is StepState.ENDED


def test_a_planned_full_disk_is_evidence(machine: FakeMachine, tmp_path: Path) -> None:
    planned = continues(TWO, ONE)
    fault = Fault(FaultKind.ENOSPC)
    planned = replace(planned, restore=replace(planned.restore, fault=fault))
    machine.behaviours[RESTORE_ONE] = fails_without_room("[Errno 28] No space left on device")
    _, outcome = carry_out(tmp_path, (planned,))
    assert outcome.steps[RESTORE_ONE].state is StepState.ENDED


def test_a_disk_that_is_full_stops_the_run_and_loses_no_line(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = os.write, [0]

    def fill(descriptor: int, data: bytes) -> int:
        written[0] += 1
        if 9 <= written[0] <= 11:  # half a line still fits, then nothing
            write(descriptor, data[: len(data) // 2] if written[0] == 9 else b"")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr("ckptdrill.store.os.write", fill)
    with pytest.raises(UserError, match="No space left on device") as caught:
        carry_out(tmp_path)
    assert caught.value.code is ExitCode.UNPROVEN
    assert "continue with --resume" in str(caught.value)
    assert machine.running == {}
    before = journal.replay(RunFolder(tmp_path / "run"))
    assert before
    done = {step_id for step_id, entry in before.items() if not entry.lost}
    machine.started.clear()
    _, outcome = carry_out(tmp_path, resume=True)
    assert {entry.state for entry in outcome.steps.values()} == {StepState.ENDED}
    assert not done & {step_id for step_id, _ in machine.started}


def test_a_launch_whose_end_cannot_be_written_stops_the_run_and_no_wait_hangs(
    machine: FakeMachine, tmp_path: Path
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    machine.on_poll = full
    with pytest.raises(UserError, match="cannot go on: No space left on device"):
        carry_out(tmp_path)


def test_a_folder_that_may_not_be_written_is_said_before_anything_starts(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_args: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr("ckptdrill.journal.os.open", read_only)
        with pytest.raises(UserError, match="Read-only file system") as caught:
            carry_out(tmp_path)
    assert caught.value.code is ExitCode.USAGE
    assert machine.started == []


def test_a_clock_that_is_put_back_between_steps_changes_nothing(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(2_000_000_000, -3600)
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    run, outcome = carry_out(tmp_path)
    assert {entry.state for entry in outcome.steps.values()} == {StepState.ENDED}
    assert journal.replay(run) == outcome.steps
    assert 0 <= store.read_json(run.run_json)["took_s"] < 600
    machine.started.clear()
    assert carry_out(tmp_path, resume=True)[1] == outcome
    assert machine.started == []


# --------------------------------------------------------------------------------------------------
# Events, pruning, replaying


def test_events_tell_the_whole_story(machine: FakeMachine, tmp_path: Path) -> None:
    events: list[Event] = []
    _, outcome = carry_out(tmp_path, report=events.append)
    ended = [event.step_id for event in events if event.state is StepState.ENDED]
    assert sorted(str(step_id) for step_id in ended) == sorted(outcome.steps)


def test_what_ended_before_a_resume_is_told(machine: FakeMachine, tmp_path: Path) -> None:
    carry_out(tmp_path)
    events: list[Event] = []
    _, outcome = carry_out(tmp_path, resume=True, report=events.append)
    assert {event.step_id for event in events} == set(outcome.steps)


def test_pruning_frees_checkpoints_and_leaves_evidence(
    machine: FakeMachine, tmp_path: Path
) -> None:
    run, _ = carry_out(tmp_path)
    assert prune(run, [RESTORE_ONE]) > 0
    assert not run.work(RESTORE_ONE).exists()
    assert (run.launch(RESTORE_ONE) / "exit.json").exists()


def test_a_kept_run_is_not_pruned(machine: FakeMachine, tmp_path: Path) -> None:
    run, _ = carry_out(tmp_path, keep=True)
    assert prune(run, [RESTORE_ONE]) == 0
    assert run.work(RESTORE_ONE).exists()


@pytest.mark.parametrize("launch_id", [RESTORE_ONE, RESTORE_DAMAGED])
def test_a_replay_runs_the_same_command_elsewhere(
    machine: FakeMachine, tmp_path: Path, launch_id: str
) -> None:
    shell = tmp_path / "it's here"
    shell.mkdir()
    python = shell / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho "seed $SEED"\n')
    python.chmod(0o755)
    given = replace(matrix(), environments={"default": Environment("default", str(python))})
    run, _ = carry_out(shell, given=given)
    script = run.cell(launch_id.removeprefix("restore.")) / "repro.sh"
    evidence = facts_of(run)
    replay = tmp_path / "replay"
    said = subprocess.run([script, replay], capture_output=True, text=True, check=True).stdout
    words = said.splitlines()
    assert words[:2] == ["-m", "torch.distributed.run"]
    assert words[words.index("--resume") + 1] == str(replay / "restore" / "step-4")
    assert words[-1] == "seed 7"
    original = run.work(launch_id) / "restore" / "step-4" / "shard"
    assert (replay / "restore/step-4/shard").read_text() == original.read_text()
    moved = json.loads((replay / "launch.json").read_text())
    assert moved["folder"] == str(replay / "facts")
    assert facts_of(run) == evidence
    again = subprocess.run([script, replay], capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (1, f"{replay} holds a replay already\n")


def shown_alone(program: Path) -> Plan:
    """A cell that came out badly, and a program that shows it without the job."""
    plan = continues(TWO, ONE)
    repro = Repro(str(program), ranks=2)
    expect = Expectation(VerdictWord.UNSUPPORTED, Reason.DIVERGED, "known", repro)
    return replace(plan, cell=replace(plan.cell, expect=expect))


def test_a_program_that_shows_a_defect_is_kept_and_started_alone(
    machine: FakeMachine, tmp_path: Path
) -> None:
    program = tmp_path / "defect.py"
    program.write_text("print('see')\n")
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "seed $SEED" "${CKPTDRILL_LAUNCH-none}"\n')
    python.chmod(0o755)
    given = replace(matrix(), environments={"default": Environment("default", str(python))})
    run, _ = carry_out(tmp_path, (continues(TWO, TWO), shown_alone(program)), given)
    cell = run.cell(RESTORE_ONE.removeprefix("restore."))
    program.unlink()
    assert (cell / "repro.py").read_text() == "print('see')\n"
    alone = tmp_path / "it's alone"
    script = [cell / "repro.sh", "--alone", alone]
    said = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[:4] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert said[-4:] == [str(cell / "repro.py"), str(alone), "seed 7", "none"]
    other = run.cell(continues(TWO, TWO).cell.id)
    assert not (other / "repro.py").exists()
    assert "--alone" not in (other / "repro.sh").read_text()


def replacement_node() -> Plan:
    return drill.load("replacement-nodes").plan(cell(TWO, TWO, "replacement-nodes"), SHARED)


@pytest.mark.parametrize("moved", [True, False])
def test_a_replay_sees_the_host_name_that_the_drill_set(
    machine: FakeMachine, tmp_path: Path, moved: bool
) -> None:
    python = tmp_path / "python3"
    # What sets the name is Python; the job that it then starts only says what it sees.
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nuname -n\n')
    python.chmod(0o755)
    given = replace(matrix(), environments={"default": Environment("default", str(python))})
    plan = replacement_node() if moved else continues(TWO, TWO)
    run, _ = carry_out(tmp_path, (plan,), given)
    script = [run.cell(plan.cell.id) / "repro.sh"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if moved and not host_names_allowed():
        assert "no process may have another host name here" in done.stderr
    else:
        assert done.stdout == f"{plan.restore.host or os.uname().nodename}\n"


def test_new_runs_never_meet(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    runs = [journal.create(tmp_path, "quick", now) for _ in range(3)]
    assert [run.root.name for run in runs] == [
        "2026-01-02T03-04-05Z",
        "2026-01-02T03-04-05Z-002",
        "2026-01-02T03-04-05Z-003",
    ]
    latest = tmp_path / "quick" / "latest"
    assert str(latest.readlink()) == runs[-1].root.name


def test_new_runs_sort_in_their_order_whatever_the_clock_does(tmp_path: Path) -> None:
    seconds = (30, 29, 0, 0, 31, 30, *([2] * 12))
    moments = [datetime(2026, 1, 2, 3, 4, second, tzinfo=UTC) for second in seconds]
    names = [journal.create(tmp_path, "quick", moment).root.name for moment in moments]
    assert names == sorted(set(names))
    assert names[1] == "2026-01-02T03-04-30Z-002"
    assert str((tmp_path / "quick" / "latest").readlink()) == names[-1]


# --------------------------------------------------------------------------------------------------
# Launches that meet a fault, and memory that is lost

TIERED = SharedLaunches(restore_step=8, saves=(4, 8), end_step=12, repeats=0, tier_saves=(10,))
STALLED = "stalled.fsdp2-to-fsdp2.storage-stall"


def met_by(name: str, shared: SharedLaunches = TIERED, **parameters: Any) -> Plan:
    address = replace(cell(TWO, TWO, name), parameters=parameters)
    return drill.load(name).plan(address, shared)


def test_what_a_launch_left_is_restored_although_its_fault_ended_it_badly(
    machine: FakeMachine, tmp_path: Path
) -> None:
    machine.behaviours[STALLED] = Behaviour(returncode=1)
    plan = met_by("storage-stall")
    run, outcome = carry_out(tmp_path, (plan,))
    fault = launch_json(run, STALLED)["fault"]
    assert (fault["kind"], fault["parameters"]["step"]) == ("enospc", 8)
    assert launch_json(run, plan.source.id)["fault"] is None
    for launch in plan.generations:
        assert outcome.steps[launch.id].state is StepState.ENDED
    copy = run.work(plan.generations[-1].id) / "restore" / "step-4"
    assert (copy / "shard").read_text() == "state of 4"
    assert '"kind": "enospc"' in (run.cell(plan.cell.id) / "repro.sh").read_text()


def test_a_job_that_chooses_gets_all_that_was_left(machine: FakeMachine, tmp_path: Path) -> None:
    plan = met_by("storage-stall", replace(TIERED, resumes_in_place=True))
    given = matrix(job(resume_args=("--auto-resume",)))
    run, _ = carry_out(tmp_path, (plan,), given)
    (restore,) = plan.generations
    out = run.work(restore.id) / "out"
    assert sorted(path.name for path in out.iterdir()) == ["latest", "step-4", "step-8"]
    assert (out / "step-8" / "shard").read_text() == "state of 8"


def with_memory(base: Path) -> Matrix:
    base.mkdir()
    tier = MemoryTier(str(base), (10,), "rank{rank}.pt")
    return matrix(job(args=("--out", "{out}", "--memory", "{memory_tier}"), memory_tier=tier))


def test_a_lost_tier_reaches_the_restore_alone_and_is_given_back(
    machine: FakeMachine, tmp_path: Path
) -> None:
    plan = met_by("memory-tier-loss", loss="one-rank")
    given = with_memory(tmp_path / "memory")
    run, _ = carry_out(tmp_path, (plan,), given)
    (failing,) = plan.failing
    assert launch_json(run, failing.id)["stop_step"] == 10
    record = store.read_json(run.tier(plan.restore.id))
    assert [entry[0] for entry in record["removed"]] == ["rank1.pt"]
    kept = run.work(plan.restore.id) / "memory-tier"
    assert [path.name for path in kept.iterdir()] == ["rank0.pt"]
    assert (kept / "rank0.pt").read_text() == "10 of 0"
    assert plan.intact is not None
    assert store.read_json(run.tier(plan.intact.id))["removed"] == []
    assert not run.tier(plan.source.id).exists()
    folders = {launch_json(run, i)["args"][3] for i in (plan.restore.id, plan.intact.id)}
    assert len(folders) == 2
    assert list((tmp_path / "memory").iterdir()) == []
    replay = (run.cell(plan.cell.id) / "repro.sh").read_text()
    assert f'cp -RLp {kept}/. "$WORK/memory-tier/"' in replay
    assert str(tmp_path / "memory") not in replay


def test_an_interrupted_run_keeps_the_memory_it_goes_on_with(
    machine: FakeMachine, tmp_path: Path
) -> None:
    plan = met_by("memory-tier-loss")
    given = with_memory(tmp_path / "memory")

    def interrupt() -> None:
        if plan.failing[0].id in machine.ended:
            machine.on_poll = lambda: None
            raise KeyboardInterrupt

    machine.on_poll = interrupt
    with pytest.raises(UserError, match="interrupted"):
        carry_out(tmp_path, (plan,), given)
    _, outcome = carry_out(tmp_path, (plan,), given, resume=True)
    assert outcome.steps[plan.restore.id].state is StepState.ENDED
    assert list((tmp_path / "memory").iterdir()) == []


# --------------------------------------------------------------------------------------------------
# A time budget


def test_a_budget_ends_what_runs_and_leaves_the_rest_out(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [run_module.time.monotonic()]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])

    def tick() -> None:
        now[0] += 1.0

    machine.on_poll = tick
    run, outcome = carry_out(tmp_path, launcher=Mode.TORCHRUN, budget_s=5.0)
    states = {step_id: entry.state for step_id, entry in outcome.steps.items()}
    assert states["source.fsdp2"] is StepState.ENDED
    left_out = {i for i, state in states.items() if state is StepState.LEFT_OUT}
    assert RESTORE_DAMAGED in left_out
    assert states.keys() == ALL_LAUNCHES | {"damage.a"}
    assert machine.running == {}
    assert outcome.steps[RESTORE_DAMAGED].lost == "the time budget of 5 s was used up"
    assert store.read_json(run.run_json)["status"] == "ran"
    _, again = carry_out(tmp_path, launcher=Mode.TORCHRUN, resume=True)
    assert {entry.state for entry in again.steps.values()} == {StepState.ENDED}


def test_a_budget_that_is_spent_before_starts_nothing(machine: FakeMachine, tmp_path: Path) -> None:
    _, outcome = carry_out(tmp_path, launcher=Mode.TORCHRUN, budget_s=60.0, spent_s=61.0)
    assert {entry.state for entry in outcome.steps.values()} == {StepState.LEFT_OUT}
    assert machine.started == []


def test_without_a_budget_nothing_is_left_out(machine: FakeMachine, tmp_path: Path) -> None:
    _, outcome = carry_out(tmp_path, budget_s=3600.0)
    assert {entry.state for entry in outcome.steps.values()} == {StepState.ENDED}


def test_the_cells_that_are_wanted_most_come_first(machine: FakeMachine, tmp_path: Path) -> None:
    first, second, third = (plan.cell.id for plan in plans())
    for order, wanted in (((third, first, second), RESTORE_DAMAGED), ((second,), RESTORE_ONE)):
        machine.started.clear()
        options = {"launcher": Mode.TORCHRUN, "capacity": Capacity(2), "order": order}
        carry_out(tmp_path / wanted, **options)
        restores = [i for i, _ in machine.started if i in (RESTORE_DAMAGED, RESTORE_ONE)]
        assert restores[0] == wanted


def test_a_clock_that_is_moved_during_a_run_is_noted(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = carry_out(tmp_path / "quiet")
    assert store.read_json(run.run_json)["clock_moved_s"] == 0
    real = run_module.time.time
    moved: list[float] = [0.0]
    monkeypatch.setattr(run_module.time, "time", lambda: real() + moved[0])
    machine.on_poll = lambda: moved.__setitem__(0, -3600.0)
    run, _ = carry_out(tmp_path / "moved")
    assert store.read_json(run.run_json)["clock_moved_s"] == -3600
