"""A restore beside a memory tier that lost something, as the judge sees it."""

import dataclasses
from typing import Any

import pytest

from ckptdrill import drill
from ckptdrill.judge import tiers
from ckptdrill.judge.evidence import Evidence
from ckptdrill.model import Cell, LaunchRecord, Policy, Reason, Verdict, VerdictWord
from ckptdrill.plan import SharedLaunches
from tests.judge.history import END_STEP, RESTORE_STEP, SAVES, WINDOW, healthy, run, telling
from tests.judge.training import Training, topology

# The job saves 4, 8 and 12 on durable storage, 2 and 10 in memory, and fails after step 10.
TIER_SAVES = (2, 10)
DECLARED = Policy(out_of_scope={"epoch boundary": "small", "inventory": "another step is saved"})
GONE = ["step-10/rank1.pt", 10, "ab"]


def evidence(
    loss: str = "one-rank",
    *,
    intact: int = 10,
    back: int | None = RESTORE_STEP,
    record: dict[str, Any] | None = None,
) -> Evidence:
    """The intact restore continues step `intact`, the other one `back` (None: it was refused)."""
    place = topology("fsdp2")
    cell = Cell("cell", place, "default", place, "default", "memory-tier-loss", {"loss": loss})
    shared = SharedLaunches(
        restore_step=RESTORE_STEP,
        saves=SAVES,
        end_step=END_STEP + 2,
        repeats=1,
        tier_saves=TIER_SAVES,
    )
    plan = drill.load("memory-tier-loss").plan(cell, shared)
    assert plan.intact is not None
    ran = {"loss": loss, "rank": 1 if loss == "one-rank" else None, "left": [], "removed": [GONE]}
    records = {plan.source.id: run(plan.source, Training())}
    records |= {launch.id: run(launch, Training()) for launch in (*plan.repeats, *plan.failing)}
    records[plan.baseline.id] = run(plan.baseline, Training(), at=RESTORE_STEP)
    records[plan.intact.id] = run(plan.intact, Training(), at=intact)
    records[plan.restore.id] = refused() if back is None else restored(plan.restore, back)
    return Evidence(
        plan=plan,
        policy=DECLARED,
        tolerance=healthy().evidence.tolerance,
        records=records,
        restore_step=RESTORE_STEP,
        start_step=0,
        window=WINDOW,
        saves=SAVES,
        checkpoint_suffix="",
        tier_saves=TIER_SAVES,
        tiers={plan.restore.id: ran if record is None else record},
    )


def restored(launch: Any, step: int) -> LaunchRecord:
    return run(launch, Training(), at=step)


def refused() -> LaunchRecord:
    return healthy().refused(0).record("restore")


def judged(*arguments: Any, **history: Any) -> Verdict:
    return tiers.judge(evidence(*arguments, **history))


@pytest.mark.parametrize("loss", ["all", "one-rank", "stale"])
def test_the_durable_generation_is_the_good_outcome(loss: str) -> None:
    verdict = judged(loss)
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.FELL_BACK), (
        verdict.explanation
    )
    assert "step 8, 2 steps are replayed" in verdict.explanation
    numbers = verdict.numbers["tiers"]
    assert numbers["memory"]["step"] == 10
    assert numbers["memory"]["steps_lost"] == 0
    assert numbers["after_loss"]["step"] == 8
    assert numbers["after_loss"]["steps_lost"] == 2
    shown = verdict.checks[-1].details
    assert shown[0].startswith("memory tier intact: recovery point step 10 (0 steps lost)")
    assert shown[1].startswith("after the loss: recovery point step 8 (2 steps lost)")
    assert numbers["after_loss"]["recovery_s"] > numbers["after_loss"]["load_to_first_step_s"] > 0


def test_a_tier_that_is_kept_twice_loses_nothing() -> None:
    verdict = judged(back=10)
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.HELD)


def test_an_older_whole_generation_is_taken_for_what_it_is() -> None:
    verdict = judged(back=4)
    assert verdict.reason is Reason.FELL_BACK
    assert "step 4, 6 steps are replayed" in verdict.explanation


def test_training_from_the_beginning_is_the_alarm() -> None:
    verdict = judged("all", back=0)
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert "began again" in verdict.explanation


def test_a_mixture_is_the_alarm() -> None:
    full = evidence()
    one, other = (restored(full.plan.restore, step) for step in (8, 10))
    facts = [f for f in one.facts if f.rank == 0] + [f for f in other.facts if f.rank == 1]
    records = {**full.records, full.plan.restore.id: telling(one, facts)}
    verdict = tiers.judge(dataclasses.replace(full, records=records))
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert "no whole generation" in verdict.explanation
    assert verdict.blame_item


def test_a_job_that_stops_is_refused() -> None:
    assert judged(back=None).reason is Reason.REFUSED


def test_a_tier_that_is_not_read_cannot_be_lost() -> None:
    verdict = judged(intact=8)
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.NOT_EXERCISED)


def test_an_intact_restore_that_fails_is_no_twin() -> None:
    full = evidence()
    records = {**full.records, full.plan.intact.id: refused()}
    verdict = tiers.judge(dataclasses.replace(full, records=records))
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.CONTROL_FAILED)


def test_a_loss_of_nothing_has_not_fired() -> None:
    record = {"loss": "one-rank", "rank": 1, "left": [GONE], "removed": []}
    assert judged(record=record).reason is Reason.FAULT_NOT_FIRED
    assert judged(record={}).word is VerdictWord.UNPROVEN


def test_no_pass_survives_the_loss_of_one_kind_of_fact_of_either_restore() -> None:
    full = evidence()
    for launch in (full.plan.intact, full.plan.restore):
        for kind in ("started", "state", "batch", "stepped", "stopped"):
            whole = full.records[launch.id]
            lacking = telling(whole, (f for f in whole.facts if f.kind != kind))
            records = {**full.records, launch.id: lacking}
            verdict = tiers.judge(dataclasses.replace(full, records=records))
            assert verdict.word is not VerdictWord.PASS, (launch.id, kind)
