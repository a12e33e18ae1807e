"""The first update after the restore, by the projections of what it changed."""

from typing import Any

import pytest

from ckptdrill.model import Held, Item, Reason, VerdictWord
from tests.judge.history import History, healthy


def updated(history: History, factor: float, launch: str = "restore", step: int = 1) -> History:
    """The state after the first step lies elsewhere, though every digest is the reference's."""

    def scale(state: dict[str, Any]) -> None:
        for values in state["projections"].values():
            values[:] = [value * factor for value in values]

    return history.edited("state", scale, launch=launch, step=step)


def test_an_update_of_another_size_is_blamed() -> None:
    verdict = updated(healthy(), 2.0).verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.UPDATES)
    check = next(c for c in verdict.checks if c.item is Item.UPDATES)
    assert check.numbers["distance"] > check.numbers["band"]
    assert check.subjects


def test_an_update_within_rounding_is_the_same() -> None:
    check = updated(healthy("fsdp2", "fsdp4"), 1 + 1e-5).check(Item.UPDATES)
    assert check.status is Held.HELD
    assert check.numbers["cosine"] == pytest.approx(1.0)
    assert check.numbers["norm_ratio"] == pytest.approx(1.0, rel=1e-3)


def test_what_the_target_topology_does_to_an_update_is_no_fault_of_the_restore() -> None:
    history = updated(healthy("fsdp2", "fsdp4"), 1.001)
    assert history.check(Item.UPDATES).status is Held.BROKEN
    assert updated(history, 1.001, "control", step=9).check(Item.UPDATES).status is Held.HELD


def test_a_control_that_makes_other_updates_itself_excuses_none() -> None:
    history = updated(updated(healthy("fsdp2", "fsdp4"), 1.1), 1.1, "control", step=9)
    check = history.check(Item.UPDATES)
    assert check.status is Held.BROKEN
    assert check.numbers["band"] == pytest.approx(0.05)


def test_a_first_step_that_changes_nothing_exercises_nothing() -> None:
    def still(state: dict[str, Any]) -> None:
        state["projections"] = {name: [1.0, 1.0] for name in state["projections"]}

    history = healthy().edited("state", still).edited("state", still, launch="source")
    verdict = history.verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.NOT_EXERCISED)
    assert verdict.blame_item is Item.UPDATES


def test_parameters_that_hold_partial_sums_are_left_out() -> None:
    def partial(state: dict[str, Any]) -> None:
        state["weights"]["mix.weight"][2] = ["partial", 0, 0]

    assert healthy().edited("state", partial).check(Item.UPDATES).status is Held.HELD


@pytest.mark.parametrize(("launch", "step"), [("source", 9), ("restore", 1)])
@pytest.mark.parametrize("rank", [0, 1])
def test_shards_of_a_rank_that_is_silent_are_in_no_sum(launch: str, step: int, rank: int) -> None:
    history = healthy("fsdp2", "fsdp2").without("state", launch=launch, step=step, rank=rank)
    check = history.check(Item.UPDATES)
    assert check.status is Held.NOT_OBSERVED
    assert check.summary.startswith(f"rank {rank} of ")


def test_an_update_outside_a_band_that_was_never_measured_is_unproven() -> None:
    history = updated(healthy("fsdp2", "fsdp4"), 1.01).ended("control", never=True)
    check = history.check(Item.UPDATES)
    assert check.status is Held.NOT_OBSERVED
    assert history.id("control") in check.summary
    assert history.verdict().word is VerdictWord.UNPROVEN
