"""What every reason of a verdict means, and what to do about it: as data, in one place.

A verdict cites one reason out of a closed list. The list command, the manual and its test all read
this table, so that a reason can be neither added without an explanation nor explained after it is
gone. The explanation of one verdict (`Verdict.explanation`) names files, tensors and steps; what
stands here holds for every verdict of that reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckptdrill.model import Reason, VerdictWord

_PASS, _UNSUPPORTED, _UNPROVEN = VerdictWord.PASS, VerdictWord.UNSUPPORTED, VerdictWord.UNPROVEN


@dataclass(frozen=True)
class Explanation:
    """The verdict a reason comes with, what it means, and the next move; one sentence each."""

    word: VerdictWord
    meaning: str
    next_move: str


EXPLANATIONS: Mapping[Reason, Explanation] = MappingProxyType(
    {
        Reason.NOT_RUN: Explanation(
            _UNPROVEN,
            "A launch that the verdict needs has not run.",
            "Continue the run with `ckptdrill run MATRIX --resume`; journal.jsonl says why it "
            "stopped.",
        ),
        Reason.HARNESS_ERROR: Explanation(
            _UNPROVEN,
            "ckptdrill could not observe or judge the cell; this says nothing about the "
            "checkpoint.",
            "Read launcher.err and the `observer_failed` lines of the launch, keep the run folder "
            "and report it.",
        ),
        Reason.DOCUMENTED_LIMIT: Explanation(
            _UNSUPPORTED,
            "A pinned document of the framework excludes this change, and no drill was asked for.",
            "Name a drill for the cell if you want the behaviour measured and not only quoted.",
        ),
        Reason.SOURCE_FAILED: Explanation(
            _UNPROVEN,
            "The source run failed, made no training step, or wrote no checkpoint where the matrix "
            "says.",
            "Read rank0.err of the source launch; compare job.args, job.checkpoint and job.saves "
            "with what the script does.",
        ),
        Reason.CONTROL_FAILED: Explanation(
            _UNPROVEN,
            "The baseline of this source does not hold, so a difference could not be blamed on the "
            "drill.",
            "Mend the baseline cell first; the others are judged once it passes.",
        ),
        Reason.FAULT_NOT_FIRED: Explanation(
            _UNPROVEN,
            "The planned fault did not happen: a damage changed no byte or could not be done, "
            "no write met a stall, or two environments came to the same versions.",
            "Choose another tensor or kind for the damage (damages/ holds the record), or versions "
            "that differ.",
        ),
        Reason.HUNG: Explanation(
            _UNSUPPORTED,
            "The time limit came while ranks were inside a load call, or a save call on failing "
            "storage.",
            "Read rank*.stacks of the launch; raise job.timeout_s if the storage really is that "
            "slow.",
        ),
        Reason.TIMED_OUT: Explanation(
            _UNPROVEN,
            "The time limit came, and no rank was inside a load call.",
            "Raise job.timeout_s, or lower job.window; rank*.stacks shows where each rank was.",
        ),
        Reason.REFUSED: Explanation(
            _UNSUPPORTED,
            "The stack raised an error while loading, and no step was trained: nothing is silently "
            "wrong.",
            "Convert the checkpoint, restore at a topology that is supported, or (after damage) "
            "let the job fall back to an older one.",
        ),
        Reason.CRASHED: Explanation(
            _UNPROVEN,
            "The restored run failed outside a load call, or died without an exception.",
            "Read rank*.err of the restore launch, the rank that failed first is named; mend it "
            "and run again.",
        ),
        Reason.HALF_CONVERTED: Explanation(
            _UNSUPPORTED,
            "A conversion ended as if it were done, and what it left is not whole.",
            "Do not restore from it: conversions/ names what is missing; convert again with "
            "another command or version.",
        ),
        Reason.DIVERGED: Explanation(
            _UNSUPPORTED,
            "The restore raised no error, and the training that follows is another one: the alarm.",
            "Do not resume this way; the verdict names the item and the tensor, group or rank to "
            "mend in the resume code.",
        ),
        Reason.UNSAFE_SAVE: Explanation(
            _UNSUPPORTED,
            "A save met failing or slow storage, and failed without a word, counted as done, left "
            "nothing whole, or piled up.",
            "Let a failed save end or be logged, keep the old checkpoint until the new one is "
            "whole, and wait for a save in the background before the next.",
        ),
        Reason.BATCH_PLAN: Explanation(
            _UNSUPPORTED,
            "The state is restored, but the target topology itself feeds the model other batches.",
            "Choose a data-parallel degree that divides the global batch, or expect this verdict "
            "in the matrix.",
        ),
        Reason.TRAINS_OTHERWISE: Explanation(
            _UNSUPPORTED,
            "The state is restored, and from equal state and samples the target topology makes "
            "another training of it: another gradient, another rate, another update.",
            "See where ranks are averaged, counted, clipped or normalised over, or approve of it "
            "(policy.approved: topology.gradients, topology.rates).",
        ),
        Reason.NOISY_REFERENCE: Explanation(
            _UNPROVEN,
            "The source does not reproduce its own loss, so the restored loss cannot be judged; "
            "the state at the restore held.",
            "Seed the job and make it deterministic, or set tolerance.loss.",
        ),
        Reason.EVIDENCE_MISSING: Explanation(
            _UNPROVEN,
            "Nothing contradicts the restore, but an item was not observed or too few steps could "
            "be compared.",
            "Make the item visible as the row says, raise job.window, or declare the item out of "
            "scope with your reason.",
        ),
        Reason.NOT_EXERCISED: Explanation(
            _UNPROVEN,
            "Nothing contradicts the restore, but the run could not have shown that an item is "
            "lost.",
            "Change the matrix as the row says (save in the second epoch, turn on dropout, damage "
            "what the job reads).",
        ),
        Reason.HELD: Explanation(
            _PASS,
            "Every item in scope held at the restore and over the compared steps.",
            "Nothing; the evidence holds for these versions, this script and this topology.",
        ),
        Reason.FELL_BACK: Explanation(
            _PASS,
            "The damage was noticed, and training went on from a whole older checkpoint.",
            "Nothing; the packet counts the steps that are trained again.",
        ),
        Reason.FAILED_CLOSED: Explanation(
            _PASS,
            "The job had been changed on purpose, and it stopped before the first step.",
            "Nothing; a checkpoint of another model is not trained on by mistake.",
        ),
    }
)
