"""What a broken item equals instead: the clause that turns an alarm into an explanation.

Each history breaks one item in one known way; the twin without that cause has no such clause.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ckptdrill.model import Held, Item
from tests.judge.history import RESTORE_STEP, History, healthy, other
from tests.judge.training import Layout, Training, topology

ALONE = Layout(topology("ddp1"), 0)
NOW = Training().state(RESTORE_STEP, ALONE)


def alone() -> History:
    """One rank, so that every entry is the whole tensor."""
    return healthy("ddp1")


def summary(history: History, item: Item) -> str:
    check = history.check(item)
    assert check.status is Held.BROKEN
    return check.summary


def details(history: History, item: Item) -> str:
    return "\n".join(history.check(item).details)


def wrong(history: History, name: str = "mix.weight") -> History:
    return history.differs("weights", name)


def restored(history: History, part: str = "weights", **data: Any) -> History:
    """A load put these values in place, or had keys that did not fit."""
    about = {"part": part, "values": {}, "unexpected": [], "missing": [], **data}
    return history.adding(history.fact("restored", **about))


def made(history: History, state: Mapping[str, Any]) -> History:
    """What stood there before anything was restored."""
    return history.adding(history.fact("state", at="made", **state))


def test_an_item_that_held_needs_no_explanation() -> None:
    explicable = made(restored(alone(), values=NOW["weights"]), NOW)
    plain = [check.summary for check in alone().verdict().checks]
    assert [check.summary for check in explicable.verdict().checks] == plain


def test_a_difference_that_equals_nothing_known_is_only_told() -> None:
    assert summary(wrong(alone()), Item.WEIGHTS) == "mix.weight differs from the reference"


# ---------------------------------------------------------------- weights and moments


def test_two_tensors_that_changed_places() -> None:
    def swap(state: dict[str, Any]) -> None:
        one, two = state["weights"]["embed.weight"], state["weights"]["mix.weight"]
        one[4], two[4] = two[4], one[4]

    said = summary(alone().state(swap), Item.WEIGHTS)
    assert "embed.weight and mix.weight are swapped" in said


@pytest.mark.parametrize(("part", "item"), [("weights", Item.WEIGHTS), ("optimizer", Item.MOMENTS)])
def test_state_of_another_step(part: str, item: Item) -> None:
    older = Training().state(4, ALONE)[part]
    said = summary(alone().state(lambda s: s[part].update(older)), item)
    assert "equals step 4, the checkpoint is step 8" in said


def test_a_scalar_that_happens_to_be_another_steps_is_no_explanation() -> None:
    history = alone().state(lambda s: s["optimizer"].update({"mix.weight.step": 4.0}))
    assert "equals step" not in summary(history, Item.MOMENTS)


def test_state_that_was_never_restored() -> None:
    fresh = {"weights": {"mix.weight": other(NOW["weights"]["mix.weight"])}}
    history = wrong(alone())
    assert "was not restored" not in summary(history, Item.WEIGHTS)
    said = summary(made(history, fresh), Item.WEIGHTS)
    assert "mix.weight stands as the process initialised it: it was not restored" in said


def test_state_that_was_restored_and_then_overwritten() -> None:
    right = {"mix.weight": NOW["weights"]["mix.weight"]}
    said = summary(restored(wrong(alone()), values=right), Item.WEIGHTS)
    assert "mix.weight was restored, then overwritten before the first step" in said
    too = {"mix.weight": other(right["mix.weight"])}
    assert "overwritten" not in summary(restored(wrong(alone()), values=too), Item.WEIGHTS)


def test_keys_that_carry_a_prefix() -> None:
    keys = ["mix.weight", "head.bias"]
    history = restored(wrong(alone()), unexpected=[f"module.{key}" for key in keys], missing=keys)
    said = summary(history, Item.WEIGHTS)
    assert "2 keys of the checkpoint did not fit and 2 of the model were not filled" in said
    assert "the stored keys carry the prefix `module.`" in said


def test_keys_that_do_not_fit_for_another_reason() -> None:
    history = restored(wrong(alone()), unexpected=["a"], missing=["mix.weight", "b"])
    said = summary(history, Item.WEIGHTS)
    assert "1 stored keys did not fit, 2 of the model were not filled" in said


def test_keys_that_are_only_left_over_explain_nothing() -> None:
    history = restored(wrong(alone()), unexpected=["a"])
    assert ";" not in summary(history, Item.WEIGHTS)


def averaged(history: History, key: str) -> History:
    """The source saved the wrong value under `key`, beside the right one."""
    leaf = {"entry": other(NOW["weights"]["mix.weight"]), "projection": [0.0, 0.0]}
    return history.edited(
        "inventory", lambda i: i["leaves"].update({key: leaf}), launch="source", step=8, at="save"
    )


def test_another_saved_leaf_in_its_place() -> None:
    said = summary(averaged(wrong(alone()), "ema.mix"), Item.WEIGHTS)
    assert "mix.weight equals the saved leaf `ema.mix`" in said


def test_what_was_saved_and_never_read_is_listed() -> None:
    history = averaged(wrong(alone()), "ema.mix")
    assert "saved but never read: ema.mix" in details(history, Item.WEIGHTS)
    read = history.edited(
        "inventory", lambda i: i["leaves"].update({"ema.mix": 1}), step=0, at="load"
    )
    assert "never read" not in details(read, Item.WEIGHTS)


def test_several_tensors_are_counted() -> None:
    older = Training().state(4, ALONE)["weights"]
    said = summary(alone().state(lambda s: s["weights"].update(older)), Item.WEIGHTS)
    assert "embed.weight (with 2 more) equals step 4" in said


# ---------------------------------------------------------------- schedule and groups


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (0, "the scheduler starts again at its beginning"),
        (16, "the scheduler was advanced twice: it stands at 16, not 8"),
        (5, "the scheduler is 3 steps behind"),
        (9, "the scheduler is 1 steps ahead"),
    ],
)
def test_where_the_scheduler_stands(last: int, words: str) -> None:
    history = alone().state(lambda s: s["schedulers"][0]["state"].update(last_epoch=last))
    assert words in summary(history, Item.SCHEDULER)


def test_a_scheduler_of_an_optimizer_that_is_not_stepped() -> None:
    history = alone().state(lambda s: s["schedulers"][0].update(drives=-1))
    assert "one that never steps" in details(history, Item.SCHEDULER)


def test_groups_as_the_constructor_left_them() -> None:
    def fresh(state: dict[str, Any]) -> None:
        state["groups"][0][0]["hyper"]["weight_decay"] = 0.0

    history = alone().state(fresh)
    assert "constructor" not in summary(history, Item.HYPERPARAMETERS)
    groups = [[{"members": [], "hyper": {**NOW["groups"][0][0]["hyper"], "weight_decay": 0.0}}]]
    said = summary(made(history, {"groups": groups}), Item.HYPERPARAMETERS)
    assert "the groups stand as the constructor left them" in said


# ---------------------------------------------------------------- data and random state


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (1, "continues with the beginning of the data"),
        (11, "continues with the batches of step 11"),
    ],
)
def test_which_batches_the_run_went_on_with(step: int, words: str) -> None:
    job = Training()
    history = alone()
    for local in range(5):
        rows = job.rows(step + local, ALONE)
        history = history.edited("batch", lambda b, r=rows: b.update(rows=r), step=local)
    assert words in summary(history, Item.DATA)


def drawing(edit: Callable[[dict[str, Any]], None], rank: int = 1) -> History:
    return healthy("ddp2").edited("rng", lambda rng: edit(rng["kinds"]), rank=rank, step=0)


def kinds_of(rank: int) -> dict[str, str]:
    return Training().rng(RESTORE_STEP, Layout(topology("ddp2"), rank))


def test_the_state_of_another_rank() -> None:
    said = summary(drawing(lambda kinds: kinds.update(kinds_of(0))), Item.RNG)
    assert "rank 1 holds the state of rank 0" in said


def put_back(history: History, by: str, torch: str, t: float) -> History:
    kinds = {**kinds_of(1), "torch": torch}
    return history.adding(history.fact("rng_set", 1, t, by=by, kinds=kinds))


def test_a_generator_that_was_restored_and_then_seeded() -> None:
    history = drawing(lambda kinds: kinds.update(torch="0" * 32))
    assert "no generator state was ever put back" in summary(history, Item.RNG)
    history = put_back(history, "torch.set_rng_state", kinds_of(1)["torch"], 1.0)
    history = put_back(history, "torch.manual_seed", "0" * 32, 2.0)
    said = summary(history, Item.RNG)
    assert "torch on rank 1 was restored, then overwritten by torch.manual_seed" in said


def test_a_generator_that_was_put_back_wrong_is_not_said_to_be_forgotten() -> None:
    history = drawing(lambda kinds: kinds.update(torch="0" * 32))
    history = put_back(history, "torch.set_rng_state", "0" * 32, 1.0)
    assert ";" not in summary(history, Item.RNG)


# ---------------------------------------------------------------- what no checkpoint holds


def updated(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    """The row of another first update, of runs whose script held these numbers before it."""

    def change(state: dict[str, Any]) -> None:
        state["projections"]["mix.weight"] = [5.0, 5.0]

    history = alone().edited("state", change, step=1, at="forward")
    there = history.fact("variables", step=RESTORE_STEP, values=dict(before))
    here = history.fact("variables", values=dict(now))
    return summary(history.adding(there, launch="source").adding(here), Item.UPDATES)


def test_variables_that_held_other_numbers_are_named() -> None:
    said = updated({"job.scale": 0.75, "job.same": 1}, {"job.scale": 1.0, "job.same": 1})
    assert said.endswith("were others before that step: job.scale is 1, the reference has 0.75")


def test_what_several_frames_hold_is_told_once() -> None:
    said = updated({"Trainer.k": 8, "main.t.k": 8, "k": 7}, {"Trainer.k": 0, "main.t.k": 0, "k": 0})
    told = "Trainer.k is 0, the reference has 8; k is 0, the reference has 7"
    assert said.endswith(f"before that step: {told}")


def test_clocks_and_what_one_run_alone_holds_explain_nothing() -> None:
    said = updated({"main.t0": 5.0, "job.start_time": 3.0, "job.old": 1}, {"main.t0": 9.0})
    assert "variables" not in said
