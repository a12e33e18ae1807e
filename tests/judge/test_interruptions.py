"""Interrupted saves: the class of each restore, and the verdict over all points."""

from dataclasses import replace
from typing import Any

import pytest

from ckptdrill.judge import interruptions
from ckptdrill.judge.interruptions import Interrupted, Interruptions, Kept, Tried, came_back
from ckptdrill.model import (
    Claim,
    FaultKind,
    Held,
    Item,
    Plan,
    Reason,
    Replay,
    Verdict,
    VerdictWord,
)
from tests.judge.history import RESTORE_STEP, History, healthy, run
from tests.judge.training import Training

OLDER = 4
FILES = {"ck": [100, "aa"]}
CANDIDATE = {"step": 8, "path": "ck", "digest": "d", "label": "mixed", "old": 3, "new": 5}


def plan() -> Plan:
    whole = healthy().evidence.plan
    step = Replay("replay.cell", whole.source, whole.source, (FaultKind.KILL,), 1)
    return replace(whole, claim=Claim.KEEPS_A_GENERATION, replay=step)


def tried(kept: Kept | None, step: int | None = None) -> Tried:
    return Tried("restore.x", kept, step, healthy().verdict())


def point(state: str, rank: int = 0, event: int = 0) -> dict[str, Any]:
    return {
        "id": f"rank{rank}.event{event}.before",
        "scope": "rank",
        "rank": rank,
        "event": event,
        "op": "open",
        "path": "ck",
        "moment": "before",
        "cut": {},
        "state": state,
    }


def found(*states: tuple[Tried, ...], **changes: Any) -> Interruptions:
    """One point for each state; the first of them is interrupted for real, and agrees."""
    names = [f"s{number}" for number in range(len(states))]
    record = {
        "step": RESTORE_STEP,
        "unexplained": None,
        "unrepeated": None,
        "varying": [],
        "took_s": 0.1,
        "points": [point(name, event=n) for n, name in enumerate(names)],
        "states": {name: {"files": FILES, "candidates": [CANDIDATE]} for name in names},
        **changes,
    }
    return Interruptions(
        record, dict(zip(names, states, strict=True)), (real(record["points"][0]),)
    )


def real(at: dict[str, Any], *, fires: bool = True, **left: Any) -> Interrupted:
    fired = "launches/confirm/rank0.jsonl:7" if fires else None
    return Interrupted(at, "confirm", fired, {**FILES, **left})


def verdict(what: Interruptions | None) -> Verdict:
    return interruptions.judge(plan(), healthy().verdict(), what, "the replay has not run")


NEWEST = (tried(Kept.NEWEST, RESTORE_STEP),)
BACK = (tried(None), tried(Kept.NEWEST, OLDER))
REFUSED = (tried(None), tried(None))
MIXED = (tried(Kept.MIXED),)


# --------------------------------------------------------------------------------------------------
# One restore


def test_a_restore_of_the_newest_generation() -> None:
    assert came_back(healthy().evidence).kept is Kept.NEWEST


def test_a_restore_that_continues_an_older_generation() -> None:
    history = healthy()
    facts = run(history.evidence.plan.restore, Training(), at=OLDER).facts
    back = came_back(history.with_facts("restore", facts).evidence)
    assert (back.kept, back.step) == (Kept.OLDER, OLDER)


def test_a_restore_that_starts_from_the_beginning_has_lost_everything() -> None:
    history = healthy()
    facts = run(history.evidence.plan.restore, Training(), at=0).facts
    back = came_back(history.with_facts("restore", facts).evidence)
    assert (back.kept, back.step) == (Kept.LOST, 0)


BROKEN: dict[str, tuple[History, Kept | None]] = {
    "some tensors are another generation's": (
        healthy().differs("weights", "embed.weight"),
        Kept.MIXED,
    ),
    "refused": (healthy().refused(0), None),
    "no checkpoint": (
        healthy()
        .ended(never=True)
        .given(skipped={healthy().id("restore"): "there is no checkpoint at /x"}),
        None,
    ),
    "nothing recorded": (healthy().without(), Kept.UNKNOWN),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_restore_that_is_not_whole(name: str) -> None:
    history, kept = BROKEN[name]
    assert came_back(history.evidence).kept is kept


# --------------------------------------------------------------------------------------------------
# The cell


def test_every_point_leaves_a_generation() -> None:
    judged = verdict(found(NEWEST, BACK, NEWEST))
    assert (judged.word, judged.reason) == (VerdictWord.PASS, Reason.HELD)
    assert "2 the newest, 1 an older one, 4 steps are replayed" in judged.explanation
    row = judged.checks[-1]
    assert (row.item, row.status) == (Item.GENERATION, Held.HELD)
    assert [each["class"] for each in row.numbers["points"]] == ["newest", "older", "newest"]
    assert [each["confirmed"] for each in row.numbers["points"]] == [True, False, False]
    assert row.facts == ("launches/confirm/rank0.jsonl:7",)


CELLS: dict[str, tuple[Interruptions | None, VerdictWord, Reason, str]] = {
    "a mixture comes before a loss": (
        found(NEWEST, REFUSED, MIXED),
        VerdictWord.UNSUPPORTED,
        Reason.DIVERGED,
        "mixture of two generations",
    ),
    "nothing is left": (
        found(NEWEST, REFUSED),
        VerdictWord.UNSUPPORTED,
        Reason.REFUSED,
        "nothing is restored",
    ),
    "there is nothing to try": (
        found(NEWEST, ()),
        VerdictWord.UNSUPPORTED,
        Reason.REFUSED,
        "nothing is restored",
    ),
    "a hang": (
        found(NEWEST, (tried(Kept.HUNG),)),
        VerdictWord.UNSUPPORTED,
        Reason.HUNG,
        "hangs",
    ),
    "a mixture is not hidden by an older whole one": (
        found((tried(Kept.MIXED), tried(Kept.NEWEST, OLDER))),
        VerdictWord.UNSUPPORTED,
        Reason.DIVERGED,
        "mixture",
    ),
    "an unknown end": (
        found(NEWEST, (tried(Kept.UNKNOWN),)),
        VerdictWord.UNPROVEN,
        Reason.EVIDENCE_MISSING,
        "not known",
    ),
    "writers that are not seen": (
        found(NEWEST, unexplained="ck has 7 bytes on disk and no file by its events"),
        VerdictWord.UNPROVEN,
        Reason.EVIDENCE_MISSING,
        "not seen: ck has 7 bytes",
    ),
    "no replay": (None, VerdictWord.UNPROVEN, Reason.NOT_RUN, "the replay has not run"),
}


@pytest.mark.parametrize("name", CELLS)
def test_the_verdict_over_the_points(name: str) -> None:
    what, word, reason, says = CELLS[name]
    judged = verdict(what)
    assert (judged.word, judged.reason) == (word, reason)
    assert says in judged.explanation


def test_a_fault_that_did_not_fire_proves_nothing() -> None:
    what = found(MIXED)
    silent = real(what.record["points"][0], fires=False)
    judged = verdict(replace(what, confirmed=(silent,)))
    assert (judged.word, judged.reason) == (VerdictWord.UNPROVEN, Reason.FAULT_NOT_FIRED)


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ({"ck": [50, "aa"]}, "ck has 50 bytes"),
        ({"ck": [100, "bb"]}, "other content"),
        ({"more": [1, "cc"]}, "more is there"),
    ],
)
def test_a_real_interruption_that_leaves_something_else_proves_nothing(
    left: dict[str, Any], says: str
) -> None:
    what = found(NEWEST)
    other = real(what.record["points"][0], **left)
    judged = verdict(replace(what, confirmed=(other,)))
    assert (judged.word, judged.reason) == (VerdictWord.UNPROVEN, Reason.EVIDENCE_MISSING)
    assert says in judged.explanation


def test_what_two_undisturbed_saves_write_differently_is_compared_by_being_there() -> None:
    what = found(NEWEST, varying=["ck"])
    other = real(what.record["points"][0], ck=[101, "bb"])
    assert verdict(replace(what, confirmed=(other,))).word is VerdictWord.PASS
    gone = real(what.record["points"][0], ck=[0, "ee"])
    assert verdict(replace(what, confirmed=(gone,))).word is VerdictWord.UNPROVEN


def test_the_time_in_a_name_is_no_difference() -> None:
    at = {"files": {"ck.1700000000.old": [9, "aa"]}, "candidates": [CANDIDATE]}
    what = found(NEWEST, states={"s0": at})
    real_one = replace(real(what.record["points"][0]), left={"ck.1700000042.old": [9, "aa"]})
    assert verdict(replace(what, confirmed=(real_one,))).word is VerdictWord.PASS


def test_a_torn_file_is_named_where_its_point_is_shown() -> None:
    what = found(NEWEST)
    torn = {**what.record["points"][0], "moment": "torn", "cut": {"ck/shard": 40}}
    what = replace(what, record={**what.record, "points": [torn]})
    (row,) = verdict(what).checks[-1].numbers["points"]
    assert row["where"] == "ck/shard torn, before open ck"


def test_the_undisturbed_save_must_hold_first() -> None:
    twin = healthy().refused(0).verdict()
    judged = interruptions.judge(plan(), twin, found(NEWEST), "")
    assert judged.claim is Claim.KEEPS_A_GENERATION
    assert judged.word is not VerdictWord.PASS
    assert "the undisturbed save already" in judged.explanation


def test_without_one_real_interruption_nothing_is_proven() -> None:
    judged = verdict(replace(found(NEWEST), confirmed=()))
    assert (judged.word, judged.reason) == (VerdictWord.UNPROVEN, Reason.EVIDENCE_MISSING)
    assert "no point of the save was interrupted for real" in judged.explanation


@pytest.mark.parametrize(("state", "word"), [(MIXED, "Unsupported"), (NEWEST, "Unproven")])
def test_a_row_that_is_open_without_a_fault_hides_no_alarm(
    state: tuple[Tried, ...], word: str
) -> None:
    whole = healthy().verdict()
    twin = replace(whole, word=VerdictWord.UNPROVEN, reason=Reason.NOT_EXERCISED)
    judged = interruptions.judge(plan(), twin, found(state), "the replay has not run")
    assert judged.word.value == word
