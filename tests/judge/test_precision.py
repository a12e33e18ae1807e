"""Loss scalers, fp8 scales and train mode: different, the same, or never moved at all."""

from typing import Any

import pytest

from ckptdrill.model import Held, Item, Reason
from tests.judge.history import History, healthy

NEVER = "never changed from one save to the next"


def everywhere(history: History, edit: Any) -> History:
    """The same change to the state of every run at every step."""
    for launch in ("source", "repeat", "baseline", "restore"):
        history = history.edited("state", edit, launch=launch)
    return history


def test_a_scaler_that_moved_and_came_back_holds() -> None:
    check = healthy("fsdp2", "ddp1").check(Item.PRECISION)
    assert (check.status, check.summary) == (Held.HELD, "loss scaler state equal")


@pytest.mark.parametrize("key", ["scale", "_growth_tracker"])
def test_a_scaler_that_differs_is_blamed(key: str) -> None:
    verdict = healthy().state(lambda s: s["scalers"][0].update({key: 1.0})).verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.PRECISION)
    assert f".{key} is 1.0" in verdict.explanation
    assert "a loss scaler" in verdict.next_move


def test_a_scaler_that_is_gone_is_blamed() -> None:
    check = healthy().state(lambda s: s["scalers"].clear()).check(Item.PRECISION)
    assert check.status is not Held.HELD


def test_a_scale_that_never_moved_exercises_nothing() -> None:
    history = everywhere(healthy(), lambda s: s["scalers"][0].update(scale=1.0))
    check = history.check(Item.PRECISION)
    assert check.status is Held.NOT_EXERCISED
    assert "never moved" in check.summary
    assert "growth_interval" in check.next_move
    assert history.verdict().reason is Reason.NOT_EXERCISED


def test_a_job_without_a_scaler_has_nothing_to_lose() -> None:
    check = everywhere(healthy(), lambda s: s.update(scalers=[])).check(Item.PRECISION)
    assert (check.status, check.summary) == (Held.HELD, "no loss scaler in use")


def test_without_state_nothing_is_said() -> None:
    assert healthy().without("state").check(Item.PRECISION).status is Held.NOT_OBSERVED


# ---------------------------------------------------------------- train and eval


def evaluating(history: History, launch: str, *names: str) -> History:
    """These layers are in eval mode, on every rank."""
    return history.edited("roots", lambda roots: roots.update(eval=[*names]), launch=launch)


def test_a_layer_left_in_eval_mode_is_blamed_by_its_name() -> None:
    history = evaluating(healthy(), "restore", "blocks.0.dropout")
    check = history.check(Item.PRECISION)
    assert (check.status, check.subjects) == (Held.BROKEN, ("blocks.0.dropout",))
    assert check.summary == "blocks.0.dropout is in eval mode, in the reference it is not"


def test_a_teacher_left_in_train_mode_is_blamed_too() -> None:
    history = evaluating(healthy(), "source", "Teacher:norm")
    assert history.check(Item.PRECISION).summary == (
        "Teacher:norm is in train mode, in the reference it is not"
    )


def test_the_same_modes_hold() -> None:
    history = evaluating(evaluating(healthy(), "source", "norm"), "restore", "norm")
    assert history.check(Item.PRECISION).status is Held.HELD


# ---------------------------------------------------------------- fp8 scales


def scaled(history: History, value: Any) -> History:
    """Every save of every run holds an `_extra_state`; `value` is a function of the local step."""
    for launch, first in (("source", 0), ("repeat", 0), ("baseline", 8), ("restore", 8)):
        for step in (4, 8, 12):
            leaf = {"layer._extra_state": value(step)}
            history = history.edited(
                "inventory",
                lambda i, leaf=leaf: i["leaves"].update(leaf),
                launch=launch,
                step=step - first,
                at="save",
            )
    return history


def test_scales_that_never_changed_exercise_nothing() -> None:
    check = scaled(healthy(), lambda _: "scale").check(Item.PRECISION)
    assert check.status is Held.NOT_EXERCISED
    assert check.summary == f"layer._extra_state {NEVER}"


def test_scales_that_change_are_exercised() -> None:
    history = scaled(healthy(), lambda step: f"scale {step}")
    assert history.check(Item.PRECISION).status is Held.HELD
