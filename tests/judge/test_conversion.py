"""What a conversion that made no whole checkpoint comes to, and what a good one is counted as."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptdrill.model import Convert, Item, Reason, VerdictWord
from tests.judge.history import History, healthy

GOOD: dict[str, Any] = {
    "took_s": 1.5,
    "ended_badly": None,
    "timed_out": False,
    "refused": False,
    "message": None,
    "problems": [],
}


def converted(**record: Any) -> History:
    """The restore of what a conversion made, with this in its record."""
    history = healthy("fsdp2", "fsdp4")
    plan = history.evidence.plan
    step = Convert(
        "convert.uni.fsdp2", "uni", plan.restore.restores, plan.source.topology, "default"
    )
    return history.given(plan=replace(plan, conversion=step), conversion={**GOOD, **record})


def test_a_good_conversion_is_a_phase_and_the_mechanism() -> None:
    verdict = converted().verdict()
    assert verdict.word is VerdictWord.PASS
    assert verdict.numbers["phases"]["conversion"] == 1.5
    row = next(check for check in verdict.checks if check.item is Item.TOPOLOGY)
    assert row.numbers["mechanism"] == "conversion"
    assert "from the conversion uni" in row.summary


@pytest.mark.parametrize(
    ("record", "word", "reason", "said"),
    [
        (
            {"ended_badly": "ended with exit code 1", "refused": True, "message": "E: stage 0"},
            VerdictWord.UNSUPPORTED,
            Reason.REFUSED,
            "refused the checkpoint: E: stage 0",
        ),
        (
            {"ended_badly": "ended with exit code 1", "message": "No module named deepspeed"},
            VerdictWord.UNPROVEN,
            Reason.CRASHED,
            "No module named deepspeed",
        ),
        (
            {"ended_badly": "exceeded its time limit after 20 s", "timed_out": True},
            VerdictWord.UNPROVEN,
            Reason.TIMED_OUT,
            "exceeded its time limit",
        ),
        (
            {
                "problems": ["b has no exp_avg.pt", "c is missing"],
                "problem_count": 7,
                "converted_bytes": 64,
            },
            VerdictWord.UNSUPPORTED,
            Reason.HALF_CONVERTED,
            "left no whole checkpoint: b has no exp_avg.pt; c is missing (and 5 more)",
        ),
        (
            {"problems": ["nothing is at step-8_uni"], "converted_bytes": 0},
            VerdictWord.UNPROVEN,
            Reason.EVIDENCE_MISSING,
            "left no checkpoint: nothing is at step-8_uni",
        ),
    ],
)
def test_a_conversion_that_failed_is_the_verdict(
    record: dict[str, Any], word: VerdictWord, reason: Reason, said: str
) -> None:
    verdict = converted(**record).verdict()
    assert (verdict.word, verdict.reason) == (word, reason)
    assert said in verdict.explanation
    assert "launches/convert.uni.fsdp2/launcher.err" in verdict.next_move


def test_without_its_record_nothing_is_proven() -> None:
    lost = "could not be done: 127 bytes are free"
    verdict = converted().given(conversion=None, skipped={"convert.uni.fsdp2": lost}).verdict()
    assert (verdict.reason, verdict.explanation) == (Reason.NOT_RUN, lost)


def test_the_mechanism_of_native_resharded_and_weights_only_restores() -> None:
    said = {
        how: healthy(*layouts).check(Item.TOPOLOGY).numbers["mechanism"]
        for how, layouts in (("native", ("fsdp2", "fsdp2")), ("reshard", ("fsdp2", "fsdp4")))
    }
    assert said == {"native": "native", "reshard": "reshard at load"}
    fresh = healthy("fsdp2", "fsdp4").loses("optimizer")
    assert fresh.check(Item.TOPOLOGY).numbers["mechanism"] == "weights-only"
    assert fresh.verdict().word is VerdictWord.UNSUPPORTED
