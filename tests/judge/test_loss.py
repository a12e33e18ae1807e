"""The loss window: inside or outside a band that was measured, or that the owner set."""

from typing import Any

import pytest

from ckptdrill.judge.loss import FLOOR, deviation
from ckptdrill.model import Held, Item, Reason, Tolerance, VerdictWord
from tests.judge.history import History, healthy
from tests.judge.training import Training


def off(history: History, factor: float, launch: str = "restore", from_step: int = 0) -> History:
    """The losses of a launch are another number of the same size."""

    def scale(stepped: dict[str, Any]) -> None:
        stepped["losses"] = [value * factor for value in stepped["losses"]]

    return history.edited("stepped", scale, launch=launch, from_step=from_step)


def test_a_restore_that_deviates_no_more_than_the_control_holds() -> None:
    check = healthy("fsdp2", "fsdp4", control=Training(loss_factor=1 + 1e-4)).check(Item.LOSS)
    assert check.status is Held.HELD
    assert check.numbers["band"] == pytest.approx(3e-4, rel=1e-3)


def test_a_restore_that_deviates_more_than_the_control_allows_is_broken() -> None:
    history = healthy("fsdp2", "fsdp4", control=Training(loss_factor=1 + 1e-4))
    verdict = off(history, 1 + 4e-4).verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.LOSS)
    assert "first outside at step 9" in verdict.explanation


def test_the_first_step_outside_is_named() -> None:
    check = off(healthy(), 1.001, from_step=3).check(Item.LOSS)
    assert "first outside at step 11" in check.summary


def test_without_variance_rounding_is_still_allowed() -> None:
    assert off(healthy(), 1 + FLOOR / 2).check(Item.LOSS).status is Held.HELD
    assert off(healthy(), 1 + FLOOR * 2).check(Item.LOSS).status is Held.BROKEN


@pytest.mark.parametrize(("tolerance", "status"), [(1e-2, Held.HELD), (1e-4, Held.BROKEN)])
def test_the_tolerance_of_the_owner_replaces_the_band(tolerance: float, status: Held) -> None:
    check = off(healthy(tolerance=Tolerance(loss=tolerance)), 1.001).check(Item.LOSS)
    assert (check.status, check.numbers["band"]) == (status, tolerance)


def test_a_reference_that_does_not_repeat_itself_leaves_the_loss_unproven() -> None:
    verdict = off(healthy(), 1.2, launch="repeat").verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.NOISY_REFERENCE)
    assert "does not reproduce itself" in verdict.explanation


def test_a_noisy_reference_does_not_excuse_the_state() -> None:
    verdict = off(healthy(), 1.2, launch="repeat").differs("weights", "mix.weight").verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.WEIGHTS)


def test_the_owner_may_allow_a_noisy_reference() -> None:
    noisy = off(healthy(tolerance=Tolerance(loss=0.5)), 1.2, launch="repeat")
    assert noisy.check(Item.LOSS).status is Held.HELD


@pytest.mark.parametrize("launch", ["control", "repeat"])
def test_a_loss_outside_a_band_that_was_never_measured_is_unproven(launch: str) -> None:
    """The planned run that would say how far the loss may go is not there."""
    history = off(healthy("fsdp2", "fsdp4"), 1.001).ended(launch, never=True)
    verdict = history.verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.EVIDENCE_MISSING)
    assert verdict.blame_item is Item.LOSS
    assert history.id(launch) in verdict.explanation


def test_a_loss_that_is_equal_needs_no_band() -> None:
    assert (
        healthy("fsdp2", "fsdp4").ended("control", never=True).check(Item.LOSS).status is Held.HELD
    )


def test_without_a_scalar_there_is_no_loss() -> None:
    history = healthy().edited("stepped", lambda s: s.update(losses=[]))
    assert history.check(Item.LOSS).status is Held.NOT_OBSERVED


def test_micro_batches_add_up() -> None:
    def split(stepped: dict[str, Any]) -> None:
        stepped["losses"] = [value / 4 for value in stepped["losses"] for _ in range(4)]

    assert healthy().edited("stepped", split).check(Item.LOSS).status is Held.HELD


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (2.0, 2.0, 0.0),
        (2.0, 3.0, 0.5),
        (0.0, 0.0, 0.0),
        (None, 1.0, float("inf")),
        (1.0, None, float("inf")),
        (None, None, float("inf")),
        (1.0, float("nan"), float("inf")),
        (float("nan"), float("nan"), float("inf")),
        (float("inf"), float("inf"), 0.0),
    ],
)
def test_a_deviation_is_relative_and_never_hides_what_is_not_a_number(
    one: float | None, two: float | None, expected: float
) -> None:
    assert deviation(one, two) == expected


def test_losses_are_put_together_as_the_two_runs_agree() -> None:
    """Each rank passes its part of a sum to backward, so that ranks halve what each has."""

    def parts(ranks: int) -> Any:
        def edit(fact: dict[str, Any]) -> None:
            fact["losses"] = [loss / ranks for loss in fact["losses"]]

        return edit

    history = healthy("ddp2", "ddp4")
    for launch, ranks in (("source", 2), ("repeat", 2), ("control", 4), ("restore", 4)):
        history = history.edited("stepped", parts(ranks), launch=launch)
    check = history.check(Item.LOSS)
    assert check.status is Held.HELD
    assert check.numbers["deviation"][0] < 1e-6


def test_a_control_that_is_far_off_itself_excuses_no_loss() -> None:
    there = healthy("fsdp2", "fsdp4", control=Training(loss_factor=1.5))
    check = there.check(Item.LOSS)
    assert check.status is Held.BROKEN
    assert check.numbers["band"] == pytest.approx(0.01)
    assert "no more than 0.01 is let pass" in check.summary
