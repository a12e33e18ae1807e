"""Judge a restore beside a memory tier of which something is lost, against one that lost nothing.

The intact restore is the twin: it must come back with the newest generation of the tier, or the
loss of it proves nothing. The other restore may come back with any whole generation; the steps
between that and the failure are replayed. Recovery time and recovery point of both tiers are told
apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptdrill.judge import continued
from ckptdrill.judge.continued import Continued, concluded
from ckptdrill.judge.evidence import Evidence
from ckptdrill.model import (
    Check,
    Held,
    Item,
    JsonValue,
    Launch,
    LaunchRecord,
    Reason,
    TierLoss,
    Verdict,
)


@dataclass(frozen=True)
class _Case:
    evidence: Evidence
    record: Mapping[str, JsonValue]  # of the loss
    intact: Continued
    lost: Continued
    failed_at: int
    durable: int

    @property
    def loss(self) -> str:
        """The loss in words."""
        rank = self.record.get("rank")
        words = {
            TierLoss.ALL: "the whole memory tier was lost",
            TierLoss.ONE_RANK: f"the memory tier of rank {rank} was lost",
            TierLoss.STALE: "the memory tier held an older generation",
        }
        return words[TierLoss(str(self.record.get("loss")))]


def judge(evidence: Evidence) -> Verdict:
    """The verdict of a cell whose plan has an intact restore and one after a loss."""
    plan = evidence.plan
    if plan.intact is None or plan.intact.tier is None or plan.intact.restores is None:
        raise ValueError("the plan has no restore beside an intact tier")
    record = evidence.tiers.get(plan.restore.id)
    for launch in (plan.intact, plan.restore):
        if evidence.record(launch.id) is None:
            why = evidence.skipped.get(launch.id, f"{launch.id} has not run")
            return concluded(evidence, Reason.NOT_RUN, why, "journal.jsonl says why")
    if not record:
        return concluded(
            evidence, Reason.FAULT_NOT_FIRED, "the loss left no record", "see journal.jsonl"
        )
    steps = {s for s in (*evidence.saves, *evidence.tier_saves) if s <= _failed_at(evidence)}
    case = _Case(
        evidence=evidence,
        record=record,
        intact=continued.continued(evidence, plan.intact, steps),
        lost=continued.continued(evidence, plan.restore, {*steps, evidence.start_step}),
        failed_at=_failed_at(evidence),
        durable=plan.intact.restores.step,
    )
    found = next(verdict for rule in _RULES if (verdict := rule(case)) is not None)
    return replace(
        found,
        checks=(*case.lost.verdict.checks, _row(case)),
        facts=found.facts or case.lost.verdict.facts,
        numbers={**case.lost.verdict.numbers, "tiers": _numbers(case)},
    )


def _failed_at(evidence: Evidence) -> int:
    """The step after which the job failed: what it had then is in its tier."""
    tier = evidence.plan.intact.tier if evidence.plan.intact else None
    failing = next(step for step in evidence.plan.failing if tier and step.id == tier.launch_id)
    return failing.stop_step


# --------------------------------------------------------------------------------------------------
# Rules, in order


def _not_repeated(case: _Case) -> Verdict | None:
    for launch in case.evidence.plan.failing:
        record = case.evidence.record(launch.id)
        verdict = record and continued.not_repeated(case.evidence, record)
        if verdict:
            return verdict
    return None


def _twin(case: _Case) -> Verdict | None:
    """With nothing lost, the job must come back with the newest generation of its tier."""
    if not case.intact.whole:
        return concluded(
            case.evidence,
            Reason.CONTROL_FAILED,
            f"with the memory tier intact already: {case.intact.verdict.explanation}",
            case.intact.verdict.next_move or "mend the restore from the memory tier first",
        )
    if case.intact.step is not None and case.intact.step <= case.durable:
        return concluded(
            case.evidence,
            Reason.NOT_EXERCISED,
            f"with the memory tier intact the job came back with step {case.intact.step}, which "
            "is on durable storage: it does not read the tier",
            "check where the job looks for its fast checkpoints",
        )
    return None


def _not_fired(case: _Case) -> Verdict | None:
    if case.record.get("removed") or case.record.get("loss") == TierLoss.STALE:
        return None
    return concluded(
        case.evidence,
        Reason.FAULT_NOT_FIRED,
        f"no file of the memory tier matches those of rank {case.record.get('rank')}",
        "correct job.memory_tier.rank_files, a glob below {memory_tier}",
    )


def _stopped(case: _Case) -> Verdict | None:
    if not case.lost.refused:
        return None
    return concluded(
        case.evidence,
        Reason.REFUSED,
        f"{case.loss}, and training did not go on: {case.lost.verdict.explanation}",
        "let the ranks agree on the newest generation that all of them have, on any tier",
    )


def _from_scratch(case: _Case) -> Verdict | None:
    if case.lost.step != case.evidence.start_step:
        return None
    return replace(
        concluded(
            case.evidence,
            Reason.DIVERGED,
            f"{case.loss}, and the job began again at step {case.lost.step} without a word",
            "end the job when it is told to resume and finds nothing",
        ),
        blame_item=Item.STEP,
        blame_subject="trained from the beginning",
    )


def _diverged(case: _Case) -> Verdict | None:
    verdict = case.lost.verdict
    if verdict.reason is not Reason.DIVERGED:
        return None
    return replace(
        concluded(
            case.evidence,
            Reason.DIVERGED,
            f"{case.loss}, and what came back is no whole generation: {verdict.explanation}",
            "let the ranks agree on the newest generation that all of them have, on any tier",
        ),
        blame_item=verdict.blame_item,
        blame_subject=verdict.blame_subject,
    )


def _unjudged(case: _Case) -> Verdict | None:
    if case.lost.whole:
        return None
    return replace(case.lost.verdict, claim=case.evidence.plan.claim)


def _recovered(case: _Case) -> Verdict:
    step = case.lost.step if case.lost.step is not None else case.durable
    replayed = max(case.failed_at - step, 0)
    return concluded(
        case.evidence,
        Reason.FELL_BACK if replayed else Reason.HELD,
        f"{case.loss}; training continues from the whole generation of step {step}, "
        f"{replayed} steps are replayed",
        "",
    )


_RULES = (
    _not_repeated,
    _twin,
    _not_fired,
    _stopped,
    _from_scratch,
    _diverged,
    _unjudged,
    _recovered,
)


# --------------------------------------------------------------------------------------------------
# What is shown


def _row(case: _Case) -> Check:
    removed = case.record.get("removed") or []
    left = case.record.get("left") or []
    return Check(
        Item.DAMAGE,
        Held.NOT_EXERCISED if _not_fired(case) else Held.HELD,
        f"{case.loss}: {len(removed)} files removed, {len(left)} left",
        details=(
            _told("memory tier intact", _recovery(case, case.intact, case.evidence.plan.intact)),
            _told("after the loss", _recovery(case, case.lost, case.evidence.plan.restore)),
            *(f"removed: {path} ({size} bytes)" for path, size, _ in removed[:8]),
        ),
        facts=(f"launches/{case.evidence.plan.restore.id}/tier.json",),
    )


def _numbers(case: _Case) -> Mapping[str, JsonValue]:
    plan = case.evidence.plan
    return {
        "failed_at": case.failed_at,
        "memory": _recovery(case, case.intact, plan.intact),
        "after_loss": _recovery(case, case.lost, plan.restore),
        "durable_step": case.durable,
    }


def _told(which: str, recovery: Mapping[str, JsonValue]) -> str:
    if recovery["recovery_s"] is None or recovery["step"] is None:
        return f"{which}: not recovered"
    point = f"step {recovery['step']} ({recovery['steps_lost']} steps lost)"
    return f"{which}: recovery point {point}, recovery time {recovery['recovery_s']:.2f} s"


def _recovery(case: _Case, found: Continued, launch: Launch | None) -> Mapping[str, JsonValue]:
    """Recovery point in steps, recovery time in seconds up to the end of the first step."""
    record = case.evidence.record(launch.id) if launch else None
    started, loading, stepped = (
        _first_times(record, kind) for kind in ("started", "load_begin", "stepped")
    )
    ready = [stepped[rank] - started[rank] for rank in stepped if rank in started]
    loaded = [stepped[rank] - loading[rank] for rank in stepped if rank in loading]
    return {
        "step": found.step,
        "steps_lost": case.failed_at - found.step if found.step is not None else None,
        "recovery_s": round(max(ready), 6) if ready else None,
        "load_to_first_step_s": round(max(loaded), 6) if loaded else None,
    }


def _first_times(record: LaunchRecord | None, kind: str) -> Mapping[int, float]:
    """Rank -> unix time of its first fact of a kind."""
    found: dict[int, float] = {}
    if record is None:
        return found
    for fact in record.of(kind):
        found.setdefault(fact.rank, record.t(fact))
    return found
