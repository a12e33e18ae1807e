"""Which saved step does a restored run really continue? The full proof, against one after another.

A job that is left to choose may come back with an older generation than the one it was given, and
that is a good outcome if it is a whole one. So the restore is judged as a continuation of each
saved step, the newest first; the first for which nothing is contradicted is the one it continues.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckptdrill.judge import state as states
from ckptdrill.judge import table
from ckptdrill.judge.evidence import Evidence
from ckptdrill.judge.trajectory import trajectory
from ckptdrill.model import Claim, Held, Launch, LaunchRecord, Reason, Verdict, VerdictWord
from ckptdrill.reasons import EXPLANATIONS


@dataclass(frozen=True)
class Continued:
    """The step that a restore continues, None when it is none of those asked for; the verdict on
    that; and whether it stopped before its first step instead.
    """

    step: int | None
    verdict: Verdict
    refused: bool

    @property
    def whole(self) -> bool:
        """It continues the same training, with all that this proof takes."""
        return self.verdict.word is VerdictWord.PASS


def continued(evidence: Evidence, launch: Launch, steps: Iterable[int]) -> Continued:
    """Judge `launch` as a restore of each of `steps`, which must not be empty."""
    bare = replace(evidence.plan, stalled=None, generations=(), intact=None)
    plan = replace(bare, claim=Claim.CONTINUES, restore=launch)
    own = replace(evidence, plan=plan, checkpoint_suffix="")
    first: Verdict | None = None
    for step in sorted(set(steps), reverse=True):
        verdict = table.judge(replace(own, restore_step=step))
        if verdict.reason is not Reason.DIVERGED:
            reached = step if verdict.checks and not _stopped(evidence, launch) else None
            return Continued(reached, verdict, _refused(evidence, launch, verdict))
        first = first or verdict
    if first is None:
        raise ValueError(f"no step to judge {launch.id} against")
    return Continued(None, first, refused=False)


def concluded(evidence: Evidence, reason: Reason, explanation: str, next_move: str) -> Verdict:
    """The verdict that comes with `reason`, on the cell of `evidence`."""
    return Verdict(
        cell_id=evidence.plan.cell.id,
        claim=evidence.plan.claim,
        word=EXPLANATIONS[reason].word,
        reason=reason,
        explanation=explanation,
        next_move=next_move,
    )


def not_repeated(evidence: Evidence, writer: LaunchRecord) -> Verdict | None:
    """That `writer`, the source once more, left no checkpoints that can be measured by the source:
    at the last step that both sampled, their states differ. None when they do not.
    """
    why = _unlike_the_source(evidence, writer)
    move = "make the job deterministic: what it left is compared with the source, bit by bit"
    return None if why is None else concluded(evidence, Reason.NOISY_REFERENCE, why, move)


def _unlike_the_source(evidence: Evidence, writer: LaunchRecord) -> str | None:
    source = evidence.records[evidence.plan.source.id]
    reference, own = (trajectory(record, evidence.start_step) for record in (source, writer))
    common = {*reference.sampled_steps()} & {*own.sampled_steps()}
    if not common:
        return f"{writer.launch_id} recorded no state at a step where the source did"
    step = max(common)
    state = states.Sampled(reference.sample("state", step), own.sample("state", step))
    rows = (row(state) for row in (states.keys, states.weights, states.buffers, states.moments))
    differing = [row for row in rows if row.status is Held.BROKEN]
    if not differing:
        return None
    what = f"{differing[0].item.value}: {differing[0].summary}"
    return f"{writer.launch_id} is not the source over again: at step {step}, {what}"


def _stopped(evidence: Evidence, launch: Launch) -> bool:
    record = evidence.record(launch.id)
    return record is None or not record.of("stepped")


def _refused(evidence: Evidence, launch: Launch, verdict: Verdict) -> bool:
    """An exception before the first step, whether or not a load call raised it."""
    ran = evidence.record(launch.id) is not None
    crashed = verdict.reason is Reason.CRASHED and _stopped(evidence, launch)
    return ran and (verdict.reason is Reason.REFUSED or crashed)
