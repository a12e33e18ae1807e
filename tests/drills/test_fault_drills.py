"""What the drills of damage and of lying pointers plan, and when they refuse to."""

from pathlib import Path
from typing import Any

import pytest

from ckptdrill import drill, matrix, resources
from ckptdrill.errors import UserError
from ckptdrill.model import Cell, Claim, DamageKind, Plan, PointerLie, Topology
from ckptdrill.plan import SharedLaunches, plan_all

TWO = Topology("two", dp_shard=2)
SHARED = SharedLaunches(restore_step=8, saves=(4, 8, 12), end_step=13, repeats=1)
IN_PLACE = SharedLaunches(8, (4, 8, 12), 13, 1, resumes_in_place=True)
ALONE = SharedLaunches(8, (8,), 13, 1, resumes_in_place=True)
KINDS = [kind for kind in DamageKind if kind is not DamageKind.POINTER]


def planned(name: str, shared: SharedLaunches = SHARED, **parameters: Any) -> Plan:
    cell = Cell("cell", TWO, "default", TWO, "default", name, parameters)
    return drill.load(name).plan(cell, shared)


@pytest.mark.parametrize("guard", ["none", "manifest"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_restore_and_its_twin(kind: DamageKind, guard: str) -> None:
    plan = planned("corrupt-shard", kind=kind, guard=guard)
    assert plan.claim is Claim.DETECTS_DAMAGE
    assert plan.damage is not None
    assert plan.damage.kind is kind
    assert plan.damage.parameters["guard"] == guard
    assert plan.restore.restores is not None
    assert plan.baseline.restores is not None
    assert (plan.restore.restores.damage_id, plan.baseline.restores.damage_id) == (
        plan.damage.id,
        None,
    )


def test_a_foreign_shard_is_that_of_the_save_before() -> None:
    damage = planned("corrupt-shard", kind="foreign-shard").damage
    assert damage is not None
    assert damage.parameters["foreign_step"] == 4


def test_a_swap_needs_the_shards_of_two_ranks() -> None:
    one = Topology("one")
    cell = Cell("cell", one, "default", one, "default", "corrupt-shard", {"kind": "swap"})
    with pytest.raises(UserError, match="the source has one"):
        drill.load("corrupt-shard").plan(cell, SHARED)
    assert planned("corrupt-shard", kind=DamageKind.SWAP).damage is not None


@pytest.mark.parametrize("parameters", [{"kind": "foreign-shard"}, {"guard": "manifest"}])
def test_what_needs_an_older_save_says_so(parameters: dict[str, str]) -> None:
    with pytest.raises(UserError, match="no step before 8 is saved") as caught:
        planned("corrupt-shard", ALONE, **parameters)
    assert "job.saves" in str(caught.value.hint)


def test_a_pointer_is_no_shard() -> None:
    allowed = drill.load("corrupt-shard").parameters["kind"]
    assert drill.refusal(allowed, "pointer") is not None


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("missing", 12),
        ("uncommitted", 12),
        ("stale", 4),
        ("garbage", None),
        ("empty", None),
        ("removed", None),
    ],
)
def test_a_lie_names_another_save_or_nothing(kind: str, named: int | None) -> None:
    damage = planned("lying-pointer", IN_PLACE, kind=kind).damage
    assert damage is not None
    assert damage.kind is DamageKind.POINTER
    assert (damage.parameters["lie"], damage.parameters.get("named_step")) == (kind, named)


def test_a_job_that_is_told_a_path_cannot_be_misled() -> None:
    with pytest.raises(UserError, match="no pointer can mislead it") as caught:
        planned("lying-pointer", SHARED)
    assert "{resume}" in str(caught.value.hint)


@pytest.mark.parametrize("kind", ["missing", "uncommitted", "stale"])
def test_a_lie_about_a_step_needs_that_step(kind: str) -> None:
    with pytest.raises(UserError, match="8 is saved"):
        planned("lying-pointer", ALONE, kind=kind)


def shipped(name: str, old: str = "", new: str = "") -> tuple[Plan, ...]:
    path = resources.matrices_dir() / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    return plan_all(matrix.parse(text.replace(old, new).encode(), path))


def test_the_shipped_matrices_hold_every_kind() -> None:
    damages = [plan.damage for plan in shipped("faults") if plan.damage]
    told = {(each.kind, each.parameters["guard"]) for each in damages}
    assert told == {(kind, guard) for kind in KINDS for guard in ("none", "manifest")}
    lies = [plan.damage.parameters["lie"] for plan in shipped("pointers") if plan.damage]
    assert sorted(lies) == sorted(PointerLie)


def test_whether_a_job_is_told_a_path_stands_in_the_matrix() -> None:
    with pytest.raises(UserError, match="no pointer can mislead it"):
        shipped("pointers", "--find, latest]", '--resume, "{resume}"]')


def test_a_replaced_node_restores_the_same_layout_under_another_host_name() -> None:
    plan = planned("replacement-nodes")
    assert (plan.claim, plan.damage) == (Claim.CONTINUES, None)
    assert plan.baseline.host is None
    assert plan.restore.host == "replacement-node"
    assert plan.restore.restores == plan.baseline.restores
    assert plan.restore.id != plan.baseline.id


TOLD = """\
version: 1
job:
  program: train.py
  args: [--out, "{out}"]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [4, 8]
  restore_step: 8
topologies: {two: {dp: 2}}
matrix:
  - source: two
    drills:
      - DRILL: {KEY: [good, 'BAD']}
"""


def told(parameters: str) -> bytes:
    """A matrix of one drill with these parameters."""
    return (
        TOLD.replace("DRILL", "mid-accumulation").replace("KEY: [good, 'BAD']", parameters).encode()
    )


def test_a_list_that_was_meant_as_one_text_is_told_as_such() -> None:
    with pytest.raises(UserError, match="write all arguments of a cell in one text"):
        matrix.parse(told("args: [--at, '4']"), Path("m.yaml"))


def test_two_cells_with_other_arguments_have_sources_of_their_own() -> None:
    plans = plan_all(matrix.parse(told("args: [--at 4, --at 6]"), Path("m.yaml")))
    sources = {plan.source.id for plan in plans}
    assert {"source.two.inside.at-4", "source.two.inside.at-6"} <= sources


@pytest.mark.parametrize(
    ("name", "key", "bad", "why"),
    [
        ("resume-options", "args", "--at {steps}", "unknown placeholder {steps}"),
        ("semantic-change", "args", '--model {"layers": 3}', "unknown placeholder"),
        ("semantic-change", "args", "--layers {", "a lone '{'; write '{{'"),
        ("mid-accumulation", "args", "--name {jobs}", "unknown placeholder {jobs}"),
        ("mid-accumulation", "checkpoint", "{uot}/inside", "did you mean 'out'"),
        ("resume-options", "args", "--stage {zero_stage}", "has no zero_stage"),
        ("resume-options", "args", "--to {memory_tier}", "job.memory_tier is not declared"),
        ("resume-options", "args", '--name "a', "No closing quotation"),
    ],
)
def test_what_a_launch_would_stumble_on_is_told_with_its_line(
    name: str, key: str, bad: str, why: str
) -> None:
    text = TOLD.replace("DRILL", name).replace("KEY", key)
    assert matrix.parse(text.replace(", 'BAD'", "").encode(), Path("m.yaml")).cells
    with pytest.raises(UserError) as caught:
        matrix.parse(text.replace("BAD", bad).encode(), Path("m.yaml"))
    place = "m.yaml:9:" if "zero_stage" in why else f"m.yaml:13:{len(name) + len(key) + 21}"
    assert str(caught.value).startswith(place)
    assert why in str(caught.value)
