"""Cells share launches: one id stands for one step, whoever asks for it."""

import dataclasses

import pytest

from ckptdrill.errors import UserError
from ckptdrill.model import Cell, Claim, Damage, DamageKind, Launch, Plan, Role, Topology
from ckptdrill.plan import SharedLaunches, cells_by_step, steps_of

SHARED = SharedLaunches(restore_step=8, saves=(4, 8, 12), end_step=13, repeats=2)
TWO, FOUR = Topology("two", dp_shard=2), Topology("four", dp_shard=4)


def cell(source: Topology, target: Topology, *, environment: str = "default") -> Cell:
    return Cell(f"{source.name}-{target.name}", source, "default", target, environment, "made-up")


def continues(source: Topology, target: Topology, **options: str) -> Plan:
    return SHARED.continues(cell(source, target, **options))


def test_cells_of_one_source_share_its_run_its_repeats_and_its_baseline() -> None:
    plans = [continues(TWO, TWO), continues(TWO, FOUR), continues(TWO, Topology("one"))]
    assert len({plan.source for plan in plans}) == 1
    assert len({plan.repeats for plan in plans}) == 1
    assert len({plan.baseline for plan in plans}) == 1
    assert [step.id for step in plans[0].repeats] == ["repeat1.two", "repeat2.two"]
    shared = cells_by_step(plans)["source.two"]
    assert shared == ("two-two", "two-four", "two-one")


def test_the_baseline_cell_is_its_own_restore_and_needs_no_control() -> None:
    plan = continues(TWO, TWO)
    assert plan.restore == plan.baseline
    assert plan.control is None


def test_a_cell_that_is_not_drilled_starts_nothing() -> None:
    left_out = dataclasses.replace(cell(TWO, FOUR), drilled=False)
    assert SHARED.continues(left_out).steps == ()


def test_another_topology_has_an_uninterrupted_control() -> None:
    plan = continues(TWO, FOUR)
    assert plan.control == Launch("control.four", Role.CONTROL, FOUR, "default", 13)
    assert plan.restore.restores is not None
    assert (plan.restore.restores.launch_id, plan.restore.restores.step) == ("source.two", 8)
    assert plan.restore.topology == FOUR


def test_another_environment_at_the_same_topology_is_not_the_baseline() -> None:
    plan = continues(TWO, TWO, environment="old")
    assert plan.restore != plan.baseline
    assert plan.restore.environment == "old"
    assert plan.baseline.environment == "default"


def test_a_damaged_restore_waits_for_the_damage_and_its_twin_does_not() -> None:
    here = cell(TWO, TWO)
    damage = Damage("damage.cell", DamageKind.DELETE, SHARED.checkpoint_of(here))
    plan = SHARED.continues(here, damage=damage, claim=Claim.DETECTS_DAMAGE)
    assert plan.claim is Claim.DETECTS_DAMAGE
    assert plan.restore.after == ("damage.cell",)
    assert plan.baseline.after == ("source.two",)
    assert plan.restore != plan.baseline


def test_every_step_is_listed_once_in_an_order_that_can_run() -> None:
    steps = steps_of([continues(TWO, FOUR), continues(FOUR, TWO), continues(TWO, TWO)])
    seen: set[str] = set()
    for name, step in steps.items():
        assert set(step.after) <= seen
        seen.add(name)
    assert len(steps) == 2 * 3 + 2 + 2 + 2  # runs and repeats, controls, baselines, restores


def test_one_id_for_two_different_steps_is_refused() -> None:
    other = dataclasses.replace(FOUR, name="two")
    with pytest.raises(UserError, match=r"two different steps are called 'source\.two'") as error:
        steps_of([continues(TWO, TWO), continues(other, other)])
    assert error.value.hint is not None
    assert "distinct names" in error.value.hint
