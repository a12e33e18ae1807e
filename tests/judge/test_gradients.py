"""First gradients: from equal state and samples they are equal at every topology, or it trains
otherwise.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from ckptdrill.judge import gradients
from ckptdrill.judge.gradients import Gradient, compared
from ckptdrill.model import Check, Held, Item, Policy, Reason, RngPolicy, VerdictWord
from tests.judge.history import History, healthy
from tests.judge.training import Training

RESTORE = 8


def scaled(
    history: History, factor: float, *names: str, launch: str = "restore", **where: Any
) -> History:
    """The gradients of these parameters (default: all) in one run, so many times as large."""

    def scale(fact: dict[str, Any]) -> None:
        for name in names or tuple(fact["leaves"]):
            leaf = fact["leaves"][name]
            *eight, square = leaf["projection"]
            leaf["projection"] = [*(factor * v for v in eight), factor * factor * square]

    return history.edited("gradient", scale, launch=launch, **where)


def row(history: History) -> Check:
    return history.check(Item.GRADIENTS)


def elsewhere(**given: Any) -> History:
    return healthy("ddp2", "ddp4", **given)


# ------------------------------------------------------------------------------------- the row


def test_equal_gradients_hold_and_say_how_near_they_are() -> None:
    check = row(elsewhere())
    assert check.status is Held.HELD
    assert "the gradients of steps 9 to 11 are the reference's" in check.summary
    assert check.numbers["band"] == gradients.LIMITS["float32"]
    assert check.facts


@pytest.mark.parametrize(("factor", "status"), [(1 + 1e-4, Held.HELD), (1 + 1e-3, Held.BROKEN)])
def test_rounding_is_no_difference_and_a_thousandth_is(factor: float, status: Held) -> None:
    assert row(scaled(elsewhere(), factor, step=0)).status is status


def test_a_sum_in_place_of_a_mean_is_called_that() -> None:
    verdict = elsewhere(control=Training(gradient_factor=2.0)).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.TRAINS_OTHERWISE)
    assert "all gradients are 2 times as large: a sum where the source has a mean" in (
        verdict.explanation
    )
    assert verdict.blame_item is Item.GRADIENTS


def test_a_clipping_is_guessed_from_a_factor_that_is_no_number_of_ranks() -> None:
    assert (
        "another clipping"
        in elsewhere(control=Training(gradient_factor=0.987)).verdict().explanation
    )


@pytest.mark.parametrize("factor", [1 / 17.29, 3.1])
def test_a_factor_near_a_whole_number_is_no_sum_of_means(factor: float) -> None:
    verdict = elsewhere(control=Training(gradient_factor=factor)).verdict()
    assert "another clipping" in verdict.explanation


def test_only_what_differs_is_named() -> None:
    history = scaled(elsewhere(), 8.0, "mix.weight")
    check = row(history)
    assert "only mix.weight: 8 times as large" in check.summary
    assert check.subjects == ("mix.weight",)


def test_a_later_step_shows_what_the_first_does_not() -> None:
    assert "the gradient of step 11" in row(scaled(elsewhere(), 1.5, step=2)).summary


def test_what_the_start_shows_counts_though_the_restore_shows_nothing() -> None:
    history = scaled(elsewhere(), 1.5, launch="control", step=0)
    assert "from equal weights and samples" in row(history).summary
    assert history.verdict().reason is Reason.TRAINS_OTHERWISE


@pytest.mark.parametrize(("noise", "status"), [(1.0, Held.BROKEN), (1.004, Held.HELD)])
def test_rounding_that_repeats_of_the_source_show_excuses_as_much_elsewhere(
    noise: float, status: Held
) -> None:
    history = scaled(elsewhere(), 1.01, launch="control", step=0)
    assert row(scaled(history, noise, launch="repeat", step=0)).status is status


def test_other_samples_at_the_start_say_nothing() -> None:
    history = scaled(elsewhere(), 1.5, launch="control", step=0).edited(
        "batch",
        lambda b: b["rows"].reverse() or b["rows"].__setitem__(0, "f" * 16),
        launch="control",
        step=0,
        rank=0,
    )
    assert row(history).status is Held.HELD


def test_a_control_that_goes_on_as_the_source_does_shows_that_something_was_lost() -> None:
    verdict = scaled(elsewhere(), 1.5).verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.GRADIENTS)


def test_a_control_that_began_with_other_weights_cannot_clear_the_topology() -> None:
    other = lambda s: s["weights"]["head.bias"].__setitem__(4, "0" * 32)  # noqa: E731
    history = scaled(elsewhere(), 1.5).edited("state", other, launch="control", step=0)
    assert history.verdict().reason is Reason.TRAINS_OTHERWISE


def drifted(name: str = "head.bias") -> History:
    """Replicas at the target that begin alike and are each stepped with a gradient of their own, so
    that they part; the mean of their gradients is the whole gradient.
    """

    def apart(fact: dict[str, Any]) -> None:
        fact["weights"][name][4] = "d" * 32

    def own(factor: float) -> Any:
        def scale(fact: dict[str, Any]) -> None:
            leaf = fact["leaves"][name]
            leaf["projection"] = [factor * v for v in leaf["projection"]]

        return scale

    history = elsewhere()
    for step in range(1, 4):
        history = history.edited("state", apart, launch="restore", rank=1, step=step)
    for rank, factor in enumerate((0.5, 1.5, 0.8, 1.2)):
        history = history.edited("gradient", own(factor), launch="restore", rank=rank)
    return history


def test_replicas_that_drift_apart_are_no_parts() -> None:
    check = row(drifted())
    assert check.status is Held.BROKEN
    assert "ranks drift apart in head.bias" in check.summary


def test_a_gradient_that_is_not_recorded_is_not_held() -> None:
    check = row(elsewhere().without("gradient", rank=1))
    assert check.status is Held.NOT_OBSERVED
    assert check.next_move


def test_a_difference_from_samples_that_nobody_can_tell_is_no_accusation() -> None:
    history = scaled(elsewhere(), 1.5).without("batch")
    assert row(history).status is Held.NOT_OBSERVED


def test_the_owner_approves_by_name() -> None:
    approved = Policy(
        rng_other_world_size=RngPolicy.NOT_GUARANTEED,
        approved={"topology.gradients": "we sum on purpose"},
    )
    history = elsewhere(policy=approved, control=Training(gradient_factor=2.0))
    check = row(history)
    assert check.status is Held.OUT_OF_SCOPE
    assert "we sum on purpose" in check.summary
    assert history.verdict().word is VerdictWord.PASS


# --------------------------------------------------------------------------------- random layers


def drawing(history: History) -> History:
    return history.edited("gradient", lambda f: f.update(drawn=True))


def test_random_layers_hide_a_difference_until_a_quiet_pair_is_made() -> None:
    check = row(drawing(scaled(elsewhere(), 1.3, "mix.weight")))
    assert check.status is Held.NOT_OBSERVED
    assert "hidden" in check.summary


def test_random_layers_that_change_nothing_hide_nothing() -> None:
    assert row(drawing(elsewhere())).status is Held.HELD


# ----------------------------------------------------------------------------- ranks put together


def handed(**vectors: Sequence[float]) -> Gradient:
    squares = {name: sum(x * x for x in v) / 8 for name, v in vectors.items()}
    return Gradient(vectors, squares, {}, {}, "float32", drawn=False)


def beside(one: Gradient, other: Gradient) -> str | None:
    found = compared(one, other, 1, noise=0.0, later=False)
    assert found is not None
    return found.told


EIGHT = [1.0, -2.0, 3.0, 0.5, -1.5, 2.5, -0.5, 1.0]


def test_a_gradient_of_rounding_alone_is_no_parameter_to_blame() -> None:
    noise = [1e-7 * v for v in EIGHT]
    other = [-3e-7 * v for v in EIGHT]
    assert beside(handed(w=EIGHT, bias=noise), handed(w=EIGHT, bias=other)) is None


def test_a_glob_names_the_layers_that_alone_differ() -> None:
    one = handed(**{f"experts.{n}.w": EIGHT for n in range(3)}, gate=EIGHT)
    eight_times = [8 * v for v in EIGHT]
    other = handed(**{f"experts.{n}.w": eight_times for n in range(3)}, gate=EIGHT)
    assert beside(one, other) == "only experts.*: 8 times as large"


def test_a_direction_tells_what_a_size_does_not() -> None:
    told = beside(handed(w=EIGHT), handed(w=EIGHT[::-1]))
    assert told is not None
    assert "cosine" in told


def test_replicas_that_were_handed_their_own_part_count_as_the_mean_of_all() -> None:
    own = elsewhere()
    for rank, factor in enumerate((0.4, 0.8, 1.2, 1.6)):
        own = scaled(own, factor, "head.bias", rank=rank)
    assert row(own).status is Held.HELD


def test_replicas_of_which_neither_mean_nor_sum_is_known_are_not_compared() -> None:
    one = scaled(elsewhere(), 1.7, "head.bias", rank=1)
    check = row(one)
    assert check.status is Held.NOT_OBSERVED
    assert "head.bias" in check.summary


# ------------------------------------------------------------------------- rates and their like


def valued(history: History, launch: str, step: int, **values: Any) -> History:
    def edit(state: dict[str, Any]) -> None:
        state["groups"][0][0]["hyper"].update(values)

    return history.edited("state", edit, launch=launch, step=step)


def test_a_value_that_the_topology_itself_changes_is_not_lost() -> None:
    here = valued(elsewhere(), "restore", 0, weight_decay=0.2)
    assert here.verdict().reason is Reason.DIVERGED
    verdict = valued(here, "control", RESTORE, weight_decay=0.2).verdict()
    assert verdict.reason is Reason.TRAINS_OTHERWISE
    assert "weight_decay of group 0 is 0.2 there and 0.1 at the source" in verdict.explanation
