"""A job changed on purpose owes its owner an exception before the first step, and nothing less."""

import dataclasses

from ckptdrill.model import Claim, Reason, VerdictWord
from tests.judge.history import History, healthy

ERROR = [{"type": "builtins.RuntimeError", "message": "size mismatch for embed.weight"}]


def changed() -> History:
    """A healthy restore of a job that was given another argument."""
    history = healthy("fsdp2", "fsdp2")
    plan = history.evidence.plan
    restore = dataclasses.replace(plan.restore, id="restore.changed", extra_args=("--blocks", "3"))
    records = {**history.evidence.records, restore.id: history.record("restore")}
    return history.given(
        plan=dataclasses.replace(plan, claim=Claim.FAILS_CLOSED, restore=restore), records=records
    )


def crashed(history: History, *, step: int) -> History:
    fact = history.fact("crashed", 0, 10.0, step=step, error=ERROR)
    return history.cut(after=step).adding(fact).ended(returncode=1)


def judged(history: History) -> tuple[VerdictWord, Reason]:
    verdict = history.verdict()
    assert verdict.claim is Claim.FAILS_CLOSED
    return verdict.word, verdict.reason


def test_a_refusal_is_the_good_outcome() -> None:
    history = changed().refused(0, 1)
    assert judged(history) == (VerdictWord.PASS, Reason.FAILED_CLOSED)
    assert "the changed job refused to go on: rank 0" in history.verdict().explanation


def test_an_exception_before_the_first_step_is_one_too() -> None:
    assert judged(crashed(changed(), step=0)) == (VerdictWord.PASS, Reason.FAILED_CLOSED)


def test_an_exception_after_a_step_has_trained_another_model() -> None:
    assert judged(crashed(changed(), step=1)) == (VerdictWord.UNPROVEN, Reason.CRASHED)


def test_a_rank_that_was_killed_has_refused_nothing() -> None:
    killed = changed().cut(after=0).ended(signal="SIGKILL", returncode=None)
    assert judged(killed) == (VerdictWord.UNPROVEN, Reason.CRASHED)


def test_a_job_that_hangs_in_a_load_has_refused_nothing() -> None:
    hung = changed().cut(after=0).without("load_end", "batch", "stepped").ended(timed_out=True)
    assert judged(hung) == (VerdictWord.UNSUPPORTED, Reason.HUNG)


def test_a_job_that_came_to_no_end_has_refused_nothing() -> None:
    slow = changed().cut(after=2).ended(timed_out=True)
    assert judged(slow) == (VerdictWord.UNPROVEN, Reason.TIMED_OUT)


def test_going_on_with_what_does_not_fit_is_the_alarm() -> None:
    history = changed().differs("weights", "mix.weight")
    assert judged(history) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    said = history.verdict().explanation
    assert "the job changed by `--blocks 3` restored without a word: weights: mix.weight" in said
    assert history.verdict().blame_subject == "mix.weight"


def test_a_change_that_changes_nothing_proves_nothing() -> None:
    assert judged(changed()) == (VerdictWord.UNPROVEN, Reason.NOT_EXERCISED)
    assert "as if nothing was changed" in changed().verdict().explanation


def test_the_unchanged_restore_is_the_twin() -> None:
    history = changed().refused(0).given(control_failed="weights differ")
    assert judged(history) == (VerdictWord.UNPROVEN, Reason.CONTROL_FAILED)
