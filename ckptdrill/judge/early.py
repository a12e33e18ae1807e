"""What can be said of a cell before its restored run is looked at.

In this order: nobody was to run it, its source failed, its fault never happened, its conversion
made nothing to restore, its restore did not run or recorded nothing, its control does not hold.
None means that there is a run to judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptdrill.judge import ending, surroundings
from ckptdrill.judge import state as states
from ckptdrill.judge.ending import End
from ckptdrill.judge.evidence import Evidence
from ckptdrill.judge.trajectory import Pair, local_steps_of_save, trajectory
from ckptdrill.model import (
    Claim,
    Convert,
    Held,
    Item,
    JsonValue,
    LaunchRecord,
    Reason,
    Verdict,
    VerdictWord,
)


def before_the_restore(evidence: Evidence) -> Verdict | None:
    """The first of these that is true, as a verdict."""
    plan = evidence.plan
    if not plan.cell.drilled:
        return _undrilled(evidence)
    source, restore = evidence.record(plan.source.id), evidence.record(plan.restore.id)
    if source is None:
        why = evidence.skipped.get(plan.source.id, "the source launch has not run")
        return _early(evidence, Reason.NOT_RUN, why, "continue the run with --resume")
    failed = _source_failure(evidence, source)
    if failed:
        return _early(evidence, Reason.SOURCE_FAILED, failed[0], failed[1])
    if plan.damage is not None and evidence.damage is None:
        why = evidence.skipped.get(plan.damage.id, "the damage step has not run")
        return _early(evidence, Reason.FAULT_NOT_FIRED, why, "see journal.jsonl")
    if evidence.damage is not None and evidence.damage.get("guard_refused"):
        return _guard_refused(evidence, evidence.damage)
    conversion = _conversion(evidence)
    if conversion is not None:
        return conversion
    if restore is None:
        why = evidence.skipped.get(plan.restore.id, "the restore launch has not run")
        return _early(evidence, Reason.NOT_RUN, why, "continue the run with --resume")
    if not restore.ranks:
        text = ending.ending(restore).text
        return _early(
            evidence,
            Reason.HARNESS_ERROR,
            f"the restore launch recorded nothing: {text}",
            f"read launches/{plan.restore.id}/launcher.err",
        )
    if evidence.control_failed and plan.restore != plan.baseline and not _own_refusal(evidence):
        return _early(
            evidence,
            Reason.CONTROL_FAILED,
            f"the same-topology restore of this source does not hold: {evidence.control_failed}",
            "mend the baseline cell first; nothing can be said of this one before",
        )
    return None


def _guard_refused(evidence: Evidence, damage: Mapping[str, JsonValue]) -> Verdict:
    """The damage was found before the load, and nothing whole was left to restore instead."""
    return Verdict(
        cell_id=evidence.plan.cell.id,
        claim=evidence.plan.claim,
        word=VerdictWord.UNSUPPORTED,
        reason=Reason.REFUSED,
        explanation=f"{surroundings.told_of(damage)}; no older checkpoint is whole, so nothing was "
        "started",
        blame_item=Item.DAMAGE,
        blame_subject=str(damage.get("file", "the checkpoint")),
        facts=(f"damages/{damage.get('id')}.json",),
        next_move="add an earlier step to job.saves, one that the job keeps",
    )


def _conversion(evidence: Evidence) -> Verdict | None:
    """What a conversion that made no whole checkpoint comes to; None where there is none to judge.

    Only a converter that ran and stopped by itself has refused the checkpoint. One that ended well
    has said that it is done: what it left lies, unless it left nothing where it was to.
    """
    step, record = evidence.plan.conversion, evidence.conversion
    if step is None:
        return None
    if record is None:
        why = evidence.skipped.get(step.id, "the conversion has not run")
        return _early(evidence, Reason.NOT_RUN, why, "continue the run with --resume")
    read = f"read launches/{step.id}/launcher.err"
    if record.get("refused"):
        return Verdict(
            cell_id=evidence.plan.cell.id,
            claim=evidence.plan.claim,
            word=VerdictWord.UNSUPPORTED,
            reason=Reason.REFUSED,
            explanation=f"the conversion {step.name} refused the checkpoint: {record['message']}",
            next_move=read,
        )
    if record.get("timed_out"):
        why = f"the conversion {step.name} {record.get('ended_badly')}"
        return _early(evidence, Reason.TIMED_OUT, why, f"raise its timeout_s, or {read}")
    if record.get("ended_badly"):
        why = f"the conversion {step.name} {record['ended_badly']}: {record.get('message')}"
        return _early(evidence, Reason.CRASHED, why, read)
    problems = record.get("problems") or ()
    if problems and not record.get("converted_bytes"):
        why = f"the conversion {step.name} left no checkpoint: {problems[0]}"
        return _early(evidence, Reason.EVIDENCE_MISSING, why, read)
    return _half_converted(evidence, step, problems) if problems else None


def _half_converted(evidence: Evidence, step: Convert, problems: Sequence[str]) -> Verdict:
    found = int(str((evidence.conversion or {}).get("problem_count", len(problems))))
    others = f" (and {found - len(problems)} more)" if found > len(problems) else ""
    return Verdict(
        cell_id=evidence.plan.cell.id,
        claim=evidence.plan.claim,
        word=VerdictWord.UNSUPPORTED,
        reason=Reason.HALF_CONVERTED,
        explanation=f"the conversion {step.name} ended well and left no whole checkpoint: "
        f"{'; '.join(problems)}{others}",
        blame_subject=problems[0],
        facts=(f"conversions/{step.id}.json",),
        next_move=f"read launches/{step.id}/launcher.err; restore nothing from it",
    )


def _undrilled(evidence: Evidence) -> Verdict:
    """Only a document that rules the change out can decide a cell that nobody drills."""
    if not evidence.exclusions:
        why = "no drill was asked for (run: false), and no pinned document rules this change out"
        return _early(evidence, Reason.NOT_RUN, why, "take `run: false` out of the matrix")
    return Verdict(
        cell_id=evidence.plan.cell.id,
        claim=evidence.plan.claim,
        word=VerdictWord.UNSUPPORTED,
        reason=Reason.DOCUMENTED_LIMIT,
        explanation=evidence.exclusions[0],
        next_move="take `run: false` out of the matrix to see what really happens",
    )


def _own_refusal(evidence: Evidence) -> bool:
    """The stack refused this target, and did not refuse the same checkpoint at the source's own
    topology: that stands, whatever else is wrong with the restore there.
    """
    baseline = evidence.record(evidence.plan.baseline.id)
    return (
        evidence.plan.claim is Claim.CONTINUES
        and ending.ending(evidence.records[evidence.plan.restore.id]).how is End.REFUSED
        and baseline is not None
        and ending.ending(baseline).how is End.TRAINED
    )


_LET_A_CLASS_STEP = (
    "if the script updates its weights by hand, let a class derived from torch.optim.Optimizer do "
    "so in its step()"
)


def _source_failure(evidence: Evidence, source: LaunchRecord) -> tuple[str, str] | None:
    """Why the source run gives no checkpoint and reference, and the next move."""
    folder = f"launches/{evidence.plan.source.id}"
    end = ending.ending(source)
    by_hand = source.of("unstepped")
    if by_hand and not source.of("stepped"):
        backwards = by_hand[0].data["backwards"]
        seen = f"it went backward {backwards} times, and no torch.optim.Optimizer stepped"
        return f"no training step of the source run was seen: {seen}", _LET_A_CLASS_STEP
    if end.how is not End.TRAINED:
        return (
            f"the source run failed: {end.text}",
            end.remedy or f"read {folder}/rank0.err and {folder}/launcher.err",
        )
    if not source.of("stepped"):
        return (
            "the source run ended without one training step (an optimizer step after a backward)",
            "check job.args: does the script train under torchrun with these?",
        )
    wanted = evidence.plan.damage or evidence.plan.conversion or evidence.plan.restore
    lost = evidence.skipped.get(wanted.id, "")
    if "no checkpoint" in lost:
        return (
            f"the source run saved nothing where the matrix says: {lost}",
            "check job.checkpoint and job.saves against what the script writes",
        )
    return _saved_over(evidence, source)


def _saved_over(evidence: Evidence, source: LaunchRecord) -> tuple[str, str] | None:
    """Checkpoints of one name, and one was saved after the step under drill, within the window:
    what is restored is that one, whatever the matrix says; unless the weights came back as they
    were at the step under drill, since a save may have come to nothing.
    """
    if evidence.checkpoint_root is None:
        return None
    step = evidence.restore_step - evidence.start_step
    saves = local_steps_of_save(source, evidence.checkpoint_root)
    later = [save for save in saves if save > step]
    if step not in saves or not later or _came_back(evidence, source):
        return None
    why = (
        f"step {evidence.restore_step} is not what a restore finds: the source run saved again at "
        f"step {evidence.start_step + later[0]}, within the window, and job.checkpoint does not "
        "name the step"
    )
    end = evidence.start_step + max(fact.step for fact in source.of("stepped"))
    if end == evidence.start_step + later[0] < evidence.plan.source.stop_step:
        why += f"; the script itself ended there, before step {evidence.plan.source.stop_step}"
        return why, "let the script train on (job.args), or name the checkpoint by its {step}"
    return why, (
        f"make job.window {later[0] - step - 1} or shorter, have the script save less often "
        "(job.args), or name the checkpoint by its {step}"
    )


def _came_back(evidence: Evidence, source: LaunchRecord) -> bool:
    """Whether the restored run began with the weights of the step under drill."""
    restore = evidence.record(evidence.plan.restore.id)
    if restore is None:
        return False
    at = evidence.restore_step
    runs = trajectory(source, evidence.start_step), trajectory(restore, at)
    return states.weights(states.sampled(Pair(*runs, at, evidence.window))).status is Held.HELD


def _early(evidence: Evidence, reason: Reason, explanation: str, next_move: str) -> Verdict:
    return Verdict(
        cell_id=evidence.plan.cell.id,
        claim=evidence.plan.claim,
        word=VerdictWord.UNPROVEN,
        reason=reason,
        explanation=explanation,
        next_move=next_move,
    )
