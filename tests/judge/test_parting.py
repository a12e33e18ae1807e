"""Ranks that went on from different steps are told by what each did; nobody else is."""

from ckptdrill.model import Item, Reason, VerdictWord
from tests.judge.history import RESTORE_STEP, History, healthy

PEER = [{"type": "builtins.RuntimeError", "message": "Connection closed by peer"}]


def broken_off(history: History) -> History:
    """The restored run made one step and lost a connection."""
    cut = history.cut(after=1)
    return cut.adding(cut.fact("crashed", 0, step=1, error=PEER)).ended(returncode=1)


def begins_at(history: History, step: int, rank: int = 1) -> History:
    """A rank began with the weights of another step of the source."""
    states = history.record("source").of("state", rank)
    there = next(f for f in states if f.step == step and f.data["at"] == "forward")
    return history.state(lambda s: s.update(weights=dict(there.data["weights"])), rank=rank)


def test_a_rank_that_began_afresh_is_told_whatever_ended_it() -> None:
    history = begins_at(broken_off(healthy("ddp2")), 0).without("load_begin", "load_end", rank=1)
    verdict = history.verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert (verdict.blame_item, verdict.blame_subject) == (Item.STEP, "rank 1")
    assert "the ranks part: rank 0 called load and trained for 1 step" in verdict.explanation
    assert "rank 1 never loaded a checkpoint and trained" in verdict.explanation
    assert "from the start, not step 8" in verdict.explanation
    assert "peer" not in verdict.explanation


def test_ranks_that_read_other_steps_part() -> None:
    verdict = begins_at(broken_off(healthy("ddp4")), 4, rank=2).verdict()
    assert "ranks 0, 1 and 3 called load" in verdict.explanation
    assert f"rank 2 called load and trained for 1 step from step 4, not step {RESTORE_STEP}" in (
        verdict.explanation
    )


def test_a_rank_that_is_sent_the_state_has_not_parted() -> None:
    history = broken_off(healthy("ddp2")).without("load_begin", "load_end", rank=1)
    assert history.verdict().reason is Reason.CRASHED


def test_ranks_that_all_begin_afresh_have_not_parted() -> None:
    history = begins_at(begins_at(broken_off(healthy("ddp2")), 0), 0, rank=0)
    assert "part" not in history.verdict().explanation


def test_a_run_that_ended_well_is_judged_by_its_rows() -> None:
    verdict = begins_at(healthy("ddp2"), 4).verdict()
    assert verdict.blame_item is not Item.STEP
