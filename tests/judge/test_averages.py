"""Averages of the weights in plain dicts: lost ones are blamed, what looks like them is not."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ckptdrill.model import Check, Held, Item, Reason
from tests.judge.history import RESTORE_STEP, SAMPLED, History, healthy
from tests.judge.training import PARAMETERS, Layout, Training, entry, topology

HERE = Layout(topology("ddp1"), 0)
STEPS = range(max(SAMPLED) + 1)
Vectors = dict[str, list[float]]
Leaves = dict[str, Any]
Content = Callable[[int], Leaves]  # completed step -> what the job holds then


def weights(step: int) -> Vectors:
    projections: Vectors = Training().state(step, HERE)["projections"]
    return projections


def leaves(content: Mapping[str, object], vectors: Vectors) -> Leaves:
    return {
        name: {"entry": entry(content[name], shape, HERE), "projection": vectors[name]}
        for name, shape in PARAMETERS.items()
    }


def moving(decay: float, begun: int = 0, lag: int = 0, every: int = 1) -> Content:
    """An average that began as the weights of step `begun`."""
    held = {begun: weights(begun)}
    for step in STEPS[begun + 1 :]:
        part = 1 - decay if step % every == 0 else 0.0
        pairs = {n: zip(v, weights(step - lag)[n], strict=True) for n, v in held[step - 1].items()}
        held[step] = {n: [a + part * (w - a) for a, w in pair] for n, pair in pairs.items()}

    def at(step: int) -> Leaves:
        if step == begun:
            return clones(0)(step)
        about = {name: (name, "average", decay, begun, step // every) for name in PARAMETERS}
        return leaves(about, held[step])

    return at


def clones(lag: int) -> Content:
    """Copies of the weights that were the present ones `lag` steps ago."""

    def at(step: int) -> Leaves:
        then = max(step - lag, 0)
        return leaves({name: (name, then) for name in PARAMETERS}, weights(then))

    return at


def unlike(word: str) -> Content:
    """Something of the weights' shapes that goes its own way."""

    def at(step: int) -> Leaves:
        vectors = {n: [float(len(word) * step + i), -1.0] for i, n in enumerate(PARAMETERS)}
        return leaves({name: (word, name, step) for name in PARAMETERS}, vectors)

    return at


def holding(source: Content, restored: Content | None, name: str = "ema.shadow") -> History:
    """A healthy history whose job holds this in its source and in its restored run."""
    history = healthy("ddp1", "ddp1")
    for launch, content, first in (
        ("source", source, 0),
        ("baseline", source, RESTORE_STEP),
        ("restore", restored, RESTORE_STEP),
    ):
        if content is not None:
            facts = [
                history.fact(
                    "inventory",
                    step=step - first,
                    launch=launch,
                    at="held",
                    name=name,
                    leaves=content(step),
                )
                for step in sorted(SAMPLED)
                if step >= first
            ]
            history = history.adding(*facts, launch=launch)
    return history


def row(history: History) -> Check:
    return history.check(Item.PRECISION)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("lag", [0, 1])
def test_an_average_that_begins_anew_is_blamed_by_name(decay: float, lag: int) -> None:
    history = holding(moving(decay, lag=lag), moving(decay, begun=RESTORE_STEP, lag=lag))
    verdict = history.verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.PRECISION)
    assert verdict.blame_subject == "ema.shadow"
    assert "it equals the restored weights: the average begins anew" in verdict.explanation


def test_an_average_that_came_back_holds() -> None:
    check = row(holding(moving(0.9), moving(0.9)))
    assert (check.status, check.summary) == (Held.HELD, "loss scaler state equal")


def test_an_average_of_another_step_is_told_as_such() -> None:
    def stale(step: int) -> Leaves:
        return moving(0.9)(4 if step == RESTORE_STEP else step)

    assert row(holding(moving(0.9), stale)).summary.endswith("it equals that of step 4")


def test_an_average_that_the_first_step_makes_anew_is_blamed() -> None:
    history = holding(moving(0.9), moving(0.9, begun=RESTORE_STEP))
    facts = [f for f in history.record("restore").facts if f.step or f.data.get("at") != "held"]
    check = row(history.with_facts("restore", facts))
    assert check.status is Held.BROKEN
    assert "begun anew in the first step" in check.summary


def test_an_average_that_moves_at_some_steps_only_is_one() -> None:
    history = holding(moving(0.9, every=3), moving(0.9, begun=RESTORE_STEP, every=3))
    assert row(history).status is Held.BROKEN


@pytest.mark.parametrize("lag", [0, 1])
def test_clones_made_anew_in_every_step_are_no_state(lag: int) -> None:
    check = row(holding(clones(lag), lambda step: clones(lag)(max(step, RESTORE_STEP))))
    assert (check.status, check.summary) == (Held.HELD, "loss scaler state equal")


def test_a_snapshot_that_stands_still_is_no_average() -> None:
    still = clones(0)(5)
    check = row(holding(lambda _: still, clones(0)))
    assert (check.status, check.summary) == (Held.HELD, "loss scaler state equal")


def test_what_goes_its_own_way_is_named_and_not_blamed() -> None:
    check = row(holding(unlike("sum"), unlike("another"), "job.way"))
    assert check.status is Held.HELD
    assert "job.way has the weights' shapes" in check.summary


def test_an_average_that_was_not_seen_again_is_not_blamed() -> None:
    assert row(holding(moving(0.9), None)).status is Held.HELD
