"""Where the job believes it is: step counters and the learning rate it really uses."""

from collections.abc import Callable
from typing import Any

import pytest

from ckptdrill.judge.progress import LR_TOLERANCE
from ckptdrill.model import Held, Item, Reason
from tests.judge.history import History, healthy

STEP, BATCH = "main.state[step]", "main.batch_index"


def counting(by: int, name: str = STEP) -> History:
    def shift(stepped: dict[str, Any]) -> None:
        stepped["counters"][name] += by

    return healthy("fsdp2", "ddp1").edited("stepped", shift)


@pytest.mark.parametrize("by", [1, -1, -3])
def test_a_counter_that_is_off_is_told_by_the_step_it_continues_from(by: int) -> None:
    verdict = counting(by).verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.STEP)
    assert verdict.blame_subject == STEP
    assert f"continues from step {8 + by}, not 8" in verdict.explanation


def test_a_counter_that_starts_again_is_told_as_such() -> None:
    verdict = counting(-8).verdict()
    assert "counts from the beginning again" in verdict.explanation
    assert verdict.checks[1].numbers["gap"] == -8


def test_an_index_that_restarts_in_every_process_is_not_a_wrong_step() -> None:
    """`enumerate(loader)` begins at 0 after every restore; a real step counter agrees."""
    history = healthy()
    counters = [f.data["counters"] for f in history.record("restore").of("stepped")]
    assert counters[0]["main.batch_index"] == 0
    assert history.check(Item.STEP).status is Held.HELD
    assert STEP in history.check(Item.STEP).summary


def only(*names: str) -> History:
    def keep(stepped: dict[str, Any]) -> None:
        stepped["counters"] = {n: v for n, v in stepped["counters"].items() if n in names}

    return healthy().edited("stepped", keep).edited("stepped", keep, launch="source")


def test_without_any_counter_the_step_is_not_observed() -> None:
    verdict = only("main.micro_step").verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.EVIDENCE_MISSING, Item.STEP)
    assert "out of scope" in verdict.next_move


def test_an_epoch_that_goes_on_at_the_same_step_tells_where_the_loop_is() -> None:
    check = only("main.state[epoch]").check(Item.STEP)
    assert (check.status, check.summary) == (Held.HELD, "`main.state[epoch]` as in the reference")


def iterating(first: int) -> History:
    """A job that counts iterations, of which every second one takes no step."""

    def count(begins: int) -> Any:
        def counted(stepped: dict[str, Any]) -> None:
            at = stepped["counters"]["main.state[step]"] - 8
            stepped["counters"] = {"main.iteration": begins + 2 * at}

        return counted

    history = healthy().edited("stepped", count(first))
    return history.edited("stepped", count(20), launch="source")


def test_iterations_that_take_no_step_are_counted_along() -> None:
    assert iterating(20).check(Item.STEP).status is Held.HELD
    assert iterating(18).check(Item.STEP).status is Held.BROKEN


def test_the_only_counter_there_is_must_continue() -> None:
    assert only("main.batch_index").check(Item.STEP).status is Held.BROKEN


@pytest.mark.parametrize(
    ("own", "by", "status"),
    [
        (STEP, 3, Held.HELD),
        ("main.batch_index", 0, Held.HELD),
        ("main.batch_index", 3, Held.BROKEN),
    ],
)
def test_a_step_that_a_library_counts_stands_in_for_one_of_the_job(
    own: str, by: int, status: Held
) -> None:
    def counted(by: int) -> Callable[[dict[str, Any]], None]:
        def edit(stepped: dict[str, Any]) -> None:
            step = stepped["counters"][STEP] + by
            kept = {n: v for n, v in stepped["counters"].items() if n == own}
            stepped["counters"] = {**kept, "plenty:Trainer.state.global_step": step}

        return edit

    history = (
        healthy().edited("stepped", counted(by)).edited("stepped", counted(0), launch="source")
    )
    assert history.check(Item.STEP).status is status


def test_a_lost_scheduler_state_is_blamed() -> None:
    def reset(state: dict[str, Any]) -> None:
        state["schedulers"][0]["state"]["last_epoch"] = 0

    verdict = healthy("fsdp2", "fsdp4").state(reset).verdict()
    assert (verdict.blame_item, verdict.blame_subject) == (Item.SCHEDULER, "scheduler")
    assert "last_epoch is 0, the reference has 8" in verdict.explanation


def test_a_scheduler_that_is_gone_is_blamed() -> None:
    def drop(state: dict[str, Any]) -> None:
        state["schedulers"] = []

    assert healthy().state(drop).check(Item.SCHEDULER).status is Held.BROKEN


def rate(factor: float, *, from_step: int = 1, rank: int | None = None) -> History:
    def scale(stepped: dict[str, Any]) -> None:
        stepped["lr"] = [value * factor for value in stepped["lr"]]

    return healthy("fsdp2", "fsdp4").edited("stepped", scale, from_step=from_step, rank=rank)


def test_an_lr_that_is_wrong_from_the_second_step_only_is_seen() -> None:
    verdict = rate(0.5, from_step=2).verdict()
    assert (verdict.blame_item, verdict.blame_subject) == (Item.SCHEDULER, "lr")
    assert "LR of step 10 is" in verdict.explanation


def test_an_lr_that_is_wrong_on_a_later_rank_only_is_seen() -> None:
    verdict = rate(0.5, rank=2).verdict()
    assert verdict.blame_item is Item.SCHEDULER
    assert "LR of step 9" in verdict.explanation
    assert "(rank 2)" in verdict.explanation


def test_an_lr_within_rounding_is_the_same() -> None:
    assert rate(1 + LR_TOLERANCE / 10).check(Item.SCHEDULER).status is Held.HELD
    assert rate(1 + LR_TOLERANCE * 10).check(Item.SCHEDULER).status is Held.BROKEN


def test_an_lr_that_stands_wrong_in_the_group_itself_is_the_groups() -> None:
    def reset(state: dict[str, Any]) -> None:
        state["groups"][0][0]["hyper"]["lr"] = 0.1

    verdict = rate(2.0).state(reset).verdict()
    assert (verdict.blame_item, verdict.blame_subject) == (
        Item.HYPERPARAMETERS,
        "param_groups[*].lr",
    )


def test_one_step_is_too_short_for_an_lr() -> None:
    history = healthy().given(window=1)
    assert history.check(Item.SCHEDULER).status is Held.NOT_OBSERVED


@pytest.mark.parametrize("launch", ["source", "restore"])
@pytest.mark.parametrize("item", [Item.STEP, Item.SCHEDULER, Item.LOSS])
def test_a_step_that_one_rank_did_not_record_leaves_the_row_open(launch: str, item: Item) -> None:
    step = {"source": 10, "restore": 2}[launch]
    history = healthy("fsdp2", "fsdp4").without("stepped", launch=launch, rank=1, step=step)
    check = history.check(item)
    assert check.status is Held.NOT_OBSERVED
    assert "rank 1" in check.summary
    assert "step 10" in check.summary
