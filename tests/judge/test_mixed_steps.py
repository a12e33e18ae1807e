"""A state put together from two steps says which rank holds which, and what a value equals."""

from typing import Any

import pytest

from ckptdrill.model import Item
from tests.judge.history import RESTORE_STEP, History, healthy


def _rank_1_holds(history: History, step: int) -> History:
    """Rank 1 came back with its part of another step, weights and moments."""
    then = next(
        fact.data
        for fact in history.record("source").facts
        if (fact.kind, fact.rank, fact.step) == ("state", 1, step)
    )

    def edit(state: dict[str, Any]) -> None:
        state["weights"], state["optimizer"] = then["weights"], then["optimizer"]

    return history.state(edit, rank=1)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_each_rank_is_named_with_the_step_it_holds(layout: str) -> None:
    check = _rank_1_holds(healthy(layout), RESTORE_STEP - 4).check(Item.WEIGHTS)
    assert (
        f"rank 0 holds step {RESTORE_STEP}, rank 1 holds step {RESTORE_STEP - 4}" in check.summary
    )


def test_a_rank_that_has_nothing_of_the_tensors_says_nothing() -> None:
    """Flat partitions: a parameter lies on one rank, the others tell an empty part of it."""

    def empty(state: dict[str, Any]) -> None:
        for part in ("weights", "optimizer"):
            for name, entry in state[part].items():
                if isinstance(entry, list):
                    state[part][name] = [entry[0], entry[1], [0], [0], "0" * 32]

    history = healthy("ddp2")
    for launch in ("source", "restore"):
        history = history.edited("state", empty, launch=launch, rank=0)
    summary = _rank_1_holds(history, RESTORE_STEP - 4).check(Item.WEIGHTS).summary
    assert f"rank 1 holds step {RESTORE_STEP - 4}" in summary
    assert "rank 0 holds" not in summary


def test_all_ranks_at_one_other_step_are_no_mixture() -> None:
    history = _rank_1_holds(healthy("ddp2"), RESTORE_STEP)
    assert "holds step" not in history.check(Item.WEIGHTS).summary


def test_a_frozen_layer_that_stayed_as_it_was_made_is_called_frozen() -> None:
    history = healthy("ddp1").differs("weights", "head.bias")
    made = next(f for f in history.record("restore").facts if f.kind == "state")
    made_fact = history.fact("state", **{**made.data, "t": 0.1, "at": "made"})
    plain = history.adding(made_fact)
    assert "not restored" in plain.check(Item.WEIGHTS).summary
    assert "frozen" not in plain.check(Item.WEIGHTS).summary
    frozen = plain.edited("roots", lambda roots: roots.update(frozen=["head.bias"]))
    assert "(head.bias is frozen)" in frozen.check(Item.WEIGHTS).summary


def test_a_weight_that_equals_its_average_says_so() -> None:
    """The average is saved under a key that ends like the weight's own."""
    history = healthy("ddp1").differs("weights", "head.bias")
    wrong = next(f for f in history.record("restore").facts if f.kind == "state")

    def edit(inventory: dict[str, Any]) -> None:
        leaves = dict(inventory["leaves"])
        leaves["ema.head.bias"] = {"entry": wrong.data["weights"]["head.bias"]}
        inventory["leaves"] = leaves

    averaged = history.edited("inventory", edit, launch="source")
    assert "equals the saved leaf" in averaged.check(Item.WEIGHTS).summary
    assert "ema.head.bias" in averaged.check(Item.WEIGHTS).summary
