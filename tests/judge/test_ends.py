"""When training ends: by itself inside the window, on one side alone, it is another training."""

import pytest

from ckptdrill.model import Held, Item, Reason, VerdictWord
from tests.judge.history import History, healthy

RESTORE = 8


def ends_by_itself(history: History, *launches: str, after: int | None = None) -> History:
    """These launches' programs come to their end, after so many steps of their own, or at the end.

    Nothing stops them from outside.
    """
    for launch in launches:
        if after is not None:
            history = history.cut(launch, after=after)
        record = history.record(launch)
        step = max(fact.step for fact in record.of("stepped"))
        facts = [history.fact("exited", r, step=step, code=0) for r in range(record.world_size)]
        history = history.without("stopped", launch=launch).adding(*facts, launch=launch)
    return history


def test_a_run_that_ends_sooner_than_its_reference_is_another_training() -> None:
    verdict = ends_by_itself(healthy(), "restore", after=3).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert verdict.blame_item is Item.STEP
    assert "the restored run ended by itself after step 11, the reference trains on" in (
        verdict.explanation
    )
    assert "patience" in verdict.next_move


def test_a_run_that_trains_beyond_the_end_of_its_reference_is_another_training() -> None:
    check = ends_by_itself(healthy(), "source", after=RESTORE + 4).check(Item.STEP)
    assert check.status is Held.BROKEN
    assert "the reference ended by itself after step 12" in check.summary


def test_runs_that_end_after_the_same_step_end_alike() -> None:
    history = ends_by_itself(healthy(), "source", after=RESTORE + 4)
    history = ends_by_itself(history, "restore", after=4)
    assert history.check(Item.STEP).status is Held.HELD


@pytest.mark.parametrize("launch", ["source", "restore"])
def test_an_end_with_the_window_says_nothing(launch: str) -> None:
    assert ends_by_itself(healthy(), launch).check(Item.STEP).status is Held.HELD


def test_a_run_that_is_cut_short_from_outside_did_not_end_by_itself() -> None:
    assert healthy().cut("restore", after=3).check(Item.STEP).status is Held.HELD


def test_other_state_comes_first_and_the_end_follows() -> None:
    history = ends_by_itself(healthy(), "restore", after=3).differs("weights", "head.bias")
    assert history.verdict().blame_item is Item.WEIGHTS


def test_an_end_that_the_target_has_by_itself_is_said_to_be_so() -> None:
    history = ends_by_itself(healthy("ddp2", "ddp4"), "control", after=RESTORE + 3)
    check = ends_by_itself(history, "restore", after=3).check(Item.STEP)
    assert "an uninterrupted run at the target does as the restored one" in check.summary
