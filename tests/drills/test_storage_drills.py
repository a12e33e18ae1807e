"""What the drills of version skew, failing storage and lost memory plan, and what they need."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import drill, matrix
from ckptdrill.errors import UserError
from ckptdrill.model import Cell, FaultKind, Plan, Tier, TierLoss, Topology, from_json, to_json
from ckptdrill.plan import SharedLaunches, plan_all, steps_of

TWO, FOUR = Topology("two", dp_shard=2), Topology("four", dp_shard=4)
SHARED = SharedLaunches(
    restore_step=8, saves=(4, 8, 12), end_step=17, repeats=1, tier_saves=(6, 10, 12)
)
MATRIX = """\
version: 1
job:
  program: train.py
  args: [--out, "{out}", --memory, "{memory_tier}"]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [4, 8, 12]
  restore_step: 8
  memory_tier: {saves: [10, 6]}
environments:
  new: {requirements: ["torch==2.14.0", ./pkg]}
  over: {python: bin/python, requirements: ["torch==2.14.0"], no_deps: true}
topologies:
  two: {dp: 2}
matrix:
  - {source: two, target: two@new}
  - {source: two, drills: [storage-stall, memory-tier-loss]}
"""


def planned(name: str, *, shared: SharedLaunches = SHARED, **parameters: Any) -> Plan:
    cell = Cell("cell", TWO, "default", FOUR, "default", name, parameters)
    return drill.load(name).plan(cell, shared)


def in_order(plan: Plan) -> None:
    """Every step comes after those it waits for, and the plan survives its file."""
    seen: set[str] = set()
    for name, step in steps_of([plan]).items():
        assert set(step.after) <= seen, name
        seen.add(name)
    assert from_json(Plan, to_json(plan)) == plan


# --------------------------------------------------------------------------------------------------
# version-skew


def test_a_skewed_restore_is_measured_against_the_reader_s_own_control() -> None:
    cell = Cell("cell", TWO, "old", TWO, "new", "version-skew")
    plan = drill.load("version-skew").plan(cell, SHARED)
    assert plan.control is not None
    assert (plan.source.environment, plan.baseline.environment) == ("old", "old")
    assert (plan.control.environment, plan.restore.environment) == ("new", "new")
    assert plan.restore.restores is not None
    assert plan.restore.restores.launch_id == plan.source.id
    in_order(plan)


def test_one_environment_cannot_be_skewed() -> None:
    with pytest.raises(UserError, match="another environment"):
        planned("version-skew")


# --------------------------------------------------------------------------------------------------
# storage-stall


def test_a_stall_hits_the_source_once_more_and_all_it_left_is_restored() -> None:
    plan = planned("storage-stall", kind="slow", seconds=2.5, writes=3, rank=1)
    assert plan.stalled is not None
    assert plan.stalled.fault is not None
    assert (plan.stalled.fault.kind, plan.stalled.fault.rank) == (FaultKind.SLOW, 1)
    assert plan.stalled.fault.parameters == {"step": 8, "seconds": 2.5, "writes": 3}
    assert plan.source.fault is None
    restored = [each.restores.step for each in plan.generations if each.restores]
    assert restored == [12, 8, 4]
    assert {each.after for each in plan.generations} == {(plan.stalled.id,)}
    in_order(plan)


def test_a_job_that_chooses_by_itself_is_given_all_that_is_left() -> None:
    plan = planned("storage-stall", shared=replace(SHARED, resumes_in_place=True))
    (restore,) = plan.generations
    assert restore.restores is not None
    assert restore.restores.template == "{out}"


def test_a_stall_of_the_first_save_has_nothing_to_keep() -> None:
    first = SharedLaunches(restore_step=4, saves=(4, 8), end_step=9, repeats=1)
    with pytest.raises(UserError, match="no step before 4 is saved"):
        planned("storage-stall", shared=first)


# --------------------------------------------------------------------------------------------------
# memory-tier-loss


def test_the_loss_and_its_twin_differ_in_the_loss_alone() -> None:
    plan = planned("memory-tier-loss", loss="one-rank")
    (failing,) = plan.failing
    assert (failing.stop_step, plan.intact is not None) == (10, True)
    assert plan.intact is not None
    assert plan.intact.tier == Tier(failing.id)
    assert plan.restore.tier == Tier(failing.id, TierLoss.ONE_RANK, 1)
    assert plan.intact.restores == plan.restore.restores
    assert plan.restore.after == (failing.id,)
    in_order(plan)


def test_a_stale_tier_is_that_of_an_earlier_failure() -> None:
    plan = planned("memory-tier-loss", loss="stale", step=12)
    assert [launch.stop_step for launch in plan.failing] == [12, 6]
    assert plan.restore.tier == Tier(plan.failing[1].id, TierLoss.STALE)
    assert plan.restore.after == (plan.failing[0].id, plan.failing[1].id)
    in_order(plan)


@pytest.mark.parametrize(
    ("tier_saves", "parameters", "message"),
    [
        ((), {}, "saves no step  after 8"),
        ((4, 8), {}, "saves no step  after 8"),
        ((10,), {"step": 11}, "saves no step 11 after 8"),
        ((10,), {"loss": "stale"}, "saves no step before 8"),
    ],
)
def test_a_tier_without_the_steps_for_it_is_refused(
    tier_saves: tuple[int, ...], parameters: dict[str, Any], message: str
) -> None:
    shared = SharedLaunches(8, (4, 8, 12), 17, 1, tier_saves=tier_saves)
    with pytest.raises(UserError, match=message):
        planned("memory-tier-loss", shared=shared, **parameters)


# --------------------------------------------------------------------------------------------------
# The matrix


def parsed(text: str = MATRIX) -> matrix.Matrix:
    return matrix.parse(text.encode(), Path("/folder/m.yaml"))


def test_the_reference_goes_on_beyond_all_that_is_restored() -> None:
    plans = plan_all(parsed())
    assert {plan.source.stop_step for plan in plans} == {12 + 5}


def test_environments_by_requirements() -> None:
    found = parsed().environments
    assert found["new"].requirements == ("torch==2.14.0", "/folder/pkg")
    assert not found["new"].inherits
    assert (found["over"].python, found["over"].inherits, found["over"].no_deps) == (
        "/folder/bin/python",
        True,
        True,
    )


def test_a_memory_tier_lies_on_a_tmpfs_unless_said_otherwise() -> None:
    tier = parsed().job.memory_tier
    assert tier is not None
    assert (tier.base, tier.saves, tier.rank_files) == ("/dev/shm", (6, 10), "**/*rank{rank}*")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{saves: [10, 6]}", "{saves: [10], rank_files: '*.pt'}", "with {rank}"),
        ("{saves: [10, 6]}", "{saves: [10], rank_files: '../{rank}'}", "with {rank}"),
        ("{saves: [10, 6]}", "{saves: []}", "at least 1"),
        ("  memory_tier: {saves: [10, 6]}\n", "", "is used, but not declared"),
        (', --memory, "{memory_tier}"', "", "is declared, and the job not told"),
        ('"torch==2.14.0", ./pkg', '"--pre"', "pip is set by PIP_"),
    ],
)
def test_a_form_that_cannot_be_meant_is_explained(old: str, new: str, message: str) -> None:
    assert old in MATRIX
    with pytest.raises(UserError, match=message):
        parsed(MATRIX.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("storage-stall", {"rank": 7}, "there is no rank 7"),
        ("storage-stall", {"seconds": -1}, "a stall of -1 seconds is none"),
        ("interrupted-save", {"confirm": 0}, "confirm must be 1 or more"),
        ("interrupted-save", {"confirm": -3}, "confirm must be 1 or more"),
        ("older-step", {"step": 3}, "step 3 is not saved"),
    ],
)
def test_what_could_prove_nothing_is_refused_by_the_plan(
    name: str, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        planned(name, **parameters)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("storage-stall", {"rank": 1}), ("interrupted-save", {"confirm": 1}), ("older-step", {})],
)
def test_what_can_is_planned(name: str, parameters: dict[str, Any]) -> None:
    assert planned(name, **parameters).cell.drill == name
