"""Judge a save that was interrupted at every point: does each leave one whole generation?

Each restore of a state is judged by itself first, with the full proof of continuity, against the
generation that is newest, then against the older ones: what it continues decides its class. A
state is then what the first checkpoint that is not refused comes to. The verdict of the cell
follows from the points: a mixture is the alarm; a point with nothing to restore is a loss; what the
replay worked out must be what real interruptions left, or nothing is proven.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ckptdrill.judge import table
from ckptdrill.judge.evidence import Evidence
from ckptdrill.model import (
    Check,
    Claim,
    Held,
    Item,
    JsonValue,
    Plan,
    Reason,
    Verdict,
    VerdictWord,
)

_NUMBER = re.compile(r"\d{5,}")


class Kept(StrEnum):
    """What a point of interruption leaves to go on from, the worst first."""

    MIXED = "mixed"  # loaded without an error, and not the training of any generation
    LOST = "lost"  # nothing is restored, although a whole generation was there before
    HUNG = "hung"
    UNKNOWN = "unknown"
    OLDER = "older"
    NEWEST = "newest"


@dataclass(frozen=True)
class Tried:
    """What one restore came to; `kept` None when it was refused. `step` is what it continues."""

    launch_id: str
    kept: Kept | None
    step: int | None
    verdict: Verdict


@dataclass(frozen=True)
class Interrupted:
    """A point that was interrupted in a real launch, and what it left. `fired` refers to the fact
    that it was, as verdicts cite it.
    """

    point: Mapping[str, Any]
    launch_id: str
    fired: str | None
    left: Mapping[str, Sequence[JsonValue]] | None
    why_not: str = ""


@dataclass(frozen=True)
class Interruptions:
    """All that the judge needs of a drill: the record of the replay, the restores of each state in
    the order in which they are tried, and the real interruptions.
    """

    record: Mapping[str, Any]
    tried: Mapping[str, tuple[Tried, ...]]
    confirmed: tuple[Interrupted, ...]


# --------------------------------------------------------------------------------------------------
# One restore


def came_back(evidence: Evidence) -> Tried:
    """The class of one restore. The plan of `evidence` claims continuity and restores the state.

    Of an older generation, rows that are not exercised stay open (an early step lies in the first
    epoch): the twin has exercised them.
    """
    newest = evidence.restore_step
    older = sorted({s for s in evidence.saves if s < newest}, reverse=True)
    first = table.judge(evidence)
    launch_id = evidence.plan.restore.id
    if _continues(first):
        return Tried(launch_id, Kept.NEWEST, newest, first)
    record = evidence.record(launch_id)
    if first.reason is Reason.DIVERGED:
        for step in (*older, evidence.start_step):
            other = table.judge(replace(evidence, restore_step=step, checkpoint_suffix=""))
            if step in older and _continues(other):
                return Tried(launch_id, Kept.OLDER, step, other)
            if step not in older and _nothing_broken(other):
                return Tried(launch_id, Kept.LOST, step, other)
        return Tried(launch_id, Kept.MIXED, None, first)
    absent = "there is no checkpoint" in evidence.skipped.get(launch_id, "")
    untrained = record is not None and not record.of("stepped")
    if absent or first.reason is Reason.REFUSED or (first.reason is Reason.CRASHED and untrained):
        return Tried(launch_id, None, None, first)
    kept = Kept.HUNG if first.reason is Reason.HUNG else Kept.UNKNOWN
    return Tried(launch_id, kept, None, first)


def _continues(verdict: Verdict) -> bool:
    return verdict.word is VerdictWord.PASS or (
        verdict.reason is Reason.NOT_EXERCISED and _nothing_broken(verdict)
    )


def _nothing_broken(verdict: Verdict) -> bool:
    return bool(verdict.checks) and all(c.status is not Held.BROKEN for c in verdict.checks)


# --------------------------------------------------------------------------------------------------
# The cell


def judge(plan: Plan, twin: Verdict, found: Interruptions | None, why_not: str) -> Verdict:
    """The verdict of a cell. `twin` is that of the undisturbed save; `why_not` explains None."""
    undisturbed = f"the undisturbed save already: {twin.explanation}"
    if not _continues(twin):
        return replace(twin, claim=plan.claim, explanation=undisturbed)
    if found is None:
        return _unproven(plan, Reason.NOT_RUN, why_not, "continue the run with --resume")
    rows = _points(found)
    check = _check(rows, found)
    verdict = _doubt(plan, found) or _of_the_points(plan, rows)
    if twin.word is not VerdictWord.PASS and verdict.word is not VerdictWord.UNSUPPORTED:
        return replace(twin, claim=plan.claim, explanation=undisturbed)
    return replace(
        verdict,
        checks=(*twin.checks, check),
        facts=verdict.facts or check.facts,
        numbers=twin.numbers,
    )


def _points(found: Interruptions) -> list[dict[str, JsonValue]]:
    """Every point with its class, the step that is continued, and the restores that say so."""
    newest = int(found.record["step"])
    rows = []
    for point in found.record["points"]:
        tried = found.tried.get(point["state"], ())
        deciding = next((each for each in tried if each.kept is not None), None)
        kept = (deciding.kept if deciding else None) or Kept.LOST
        step = deciding.step if deciding else None
        first = deciding or (tried[0] if tried else None)
        if deciding is not None and kept is Kept.NEWEST and step != newest:
            kept = Kept.OLDER
        rows.append(
            {
                **{key: point[key] for key in ("id", "scope", "rank", "event", "op", "path")},
                "moment": point["moment"],
                "where": _where(point),
                "state": point["state"],
                "class": kept.value,
                "steps_lost": newest - step if step is not None else None,
                "restores": [each.launch_id for each in tried],
                "why": first.verdict.explanation if first else "nothing is left to restore",
                "files": found.record["states"][point["state"]]["candidates"][0],
            }
        )
    return rows


def _check(rows: Sequence[Mapping[str, Any]], found: Interruptions) -> Check:
    counts = Counter(row["class"] for row in rows)
    broken = [row for row in rows if row["class"] in (Kept.MIXED, Kept.LOST, Kept.HUNG)]
    unknown = [row for row in rows if row["class"] == Kept.UNKNOWN]
    status = Held.BROKEN if broken else Held.NOT_OBSERVED if unknown or not rows else Held.HELD
    return Check(
        item=Item.GENERATION,
        status=status,
        summary=f"{len(rows)} points: "
        + ", ".join(f"{counts[kept]} {kept.value}" for kept in Kept if counts[kept]),
        subjects=tuple(row["id"] for row in broken[:8]),
        details=tuple(_sentence(row) for row in _distinct(broken or unknown)),
        facts=tuple(each.fired for each in found.confirmed if each.fired is not None),
        numbers={
            "counts": {kept.value: counts[kept] for kept in Kept},
            "points": _table(rows, found),
            "states": len(found.record["states"]),
            "took_s": found.record.get("took_s"),
        },
    )


def _distinct(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first point of each state."""
    return list({row["state"]: row for row in reversed(list(rows))}.values())[::-1]


def _table(rows: Sequence[Mapping[str, Any]], found: Interruptions) -> list[dict[str, JsonValue]]:
    """The points as they are shown: `confirmed` are those that were interrupted for real."""
    real = {each.point["id"] for each in found.confirmed if each.fired is not None}
    return [{**row, "confirmed": row["id"] in real} for row in rows]


def _doubt(plan: Plan, found: Interruptions) -> Verdict | None:
    """Why the points prove nothing, if they do not."""
    if found.record["unexplained"]:
        return _unproven(
            plan,
            Reason.EVIDENCE_MISSING,
            f"the save writes in a way that is not seen: {found.record['unexplained']}",
            "what writes there? A process of its own, or a library outside Python",
        )
    if not found.record["points"] or not found.confirmed:
        return _unproven(
            plan,
            Reason.EVIDENCE_MISSING,
            "no point of the save was interrupted for real",
            "let `confirm` be 1 or more",
        )
    for each in found.confirmed:
        if each.fired is None:
            return _unproven(
                plan,
                Reason.FAULT_NOT_FIRED,
                f"{each.point['id']} was to be interrupted for real and was not: "
                f"{each.why_not or found.record['unrepeated'] or 'no fact says that it was'}",
                f"read launches/{each.launch_id}/rank{each.point['rank']}.jsonl",
            )
    for each in found.confirmed:
        difference = _difference(found.record, each)
        if difference:
            return _unproven(
                plan,
                Reason.EVIDENCE_MISSING,
                f"interrupted for real, {each.point['id']} leaves something else than was worked "
                f"out: {difference}",
                f"compare launches/{each.launch_id}/left.json with replays/",
            )
    return None


def _difference(record: Mapping[str, Any], real: Interrupted) -> str | None:
    """How the folder of a real interruption differs from the state worked out for that point.

    Files that two undisturbed saves do not write alike are compared by being there and being empty.
    """
    expected: Mapping[str, Sequence[JsonValue]] | None
    expected = record["states"][real.point["state"]]["files"]
    if expected is None:
        return None  # the process may have answered: what it left is the state
    varying = {_NUMBER.sub("#", path) for path in record["varying"]}
    left, expected = (_without_times(files) for files in (real.left or {}, expected))
    for path in sorted({*expected, *left}):
        there, wanted = left.get(path), expected.get(path)
        if there is None or wanted is None:
            return f"{path} is {'missing' if there is None else 'there'}"
        same = bool(there[0]) == bool(wanted[0]) if path in varying else list(there) == list(wanted)
        if not same:
            return f"{path} has {there[0]} bytes, not the {wanted[0]} expected, or other content"
    return None


def _without_times(files: Mapping[str, Sequence[JsonValue]]) -> dict[str, Sequence[JsonValue]]:
    """Files by name, with long numbers in names (times, process ids) left out."""
    return {_NUMBER.sub("#", path): value for path, value in files.items()}


def _of_the_points(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """The rules over the points, the alarm first."""
    again = [row for row in rows if row["class"] == Kept.LOST and row["steps_lost"] is not None]
    if again:
        what = "the job began again, without a word, at what no save holds"
        move = "let a job that finds nothing to restore fail, or say that it begins anew"
        return _verdict(plan, Reason.DIVERGED, again, f"{what}: {_sentence(again[0])}", move)
    for kept, reason, what, move in _RULES:
        there = [row for row in rows if row["class"] == kept]
        if there:
            return _verdict(plan, reason, there, f"{what}: {_sentence(there[0])}", move)
    older = [row for row in rows if row["class"] == Kept.OLDER]
    lost = max((row["steps_lost"] or 0 for row in older), default=0)
    return Verdict(
        cell_id=plan.cell.id,
        claim=Claim.KEEPS_A_GENERATION,
        word=VerdictWord.PASS,
        reason=Reason.HELD,
        explanation=f"all {len(rows)} points leave a whole generation that the job continues: "
        f"{len(rows) - len(older)} the newest, {len(older)} an older one"
        + (f", {lost} steps are replayed" if older else ""),
    )


def _sentence(row: Mapping[str, Any]) -> str:
    who = f"rank {row['rank']}" if row["scope"] == "rank" else f"the job, rank {row['rank']}"
    held = row["files"]
    pieces = f"; {held['old']} old and {held['new']} new pieces" if held["old"] else ""
    return f"{who} at event {row['event']} ({row['where']}{pieces}): {row['why']}"


def _where(point: Mapping[str, Any]) -> str:
    """`before rename ck/.metadata.tmp`, `ck/model.pt torn, before saved`."""
    event = f"before {point['op']} {point['path'] or ''}".strip()
    files = ", ".join(sorted(point["cut"]))
    return f"{files} {point['moment']}, {event}" if files else event


_RULES = (
    (
        Kept.MIXED,
        Reason.DIVERGED,
        "a mixture of two generations is loaded without an error",
        "save into a fresh folder or file, and publish it last; never over the only good one",
    ),
    (
        Kept.LOST,
        Reason.REFUSED,
        "nothing is restored, although there was a whole generation before the save",
        "keep the old generation until the new one is whole: write beside it, then rename",
    ),
    (
        Kept.HUNG,
        Reason.HUNG,
        "the restore hangs on what an interruption leaves",
        "let a load of an incomplete checkpoint fail",
    ),
    (
        Kept.UNKNOWN,
        Reason.EVIDENCE_MISSING,
        "it is not known what an interruption leaves",
        "read the launches of `restores` of that point",
    ),
)


def _verdict(
    plan: Plan, reason: Reason, rows: Sequence[Mapping[str, Any]], text: str, move: str
) -> Verdict:
    proven = reason is not Reason.EVIDENCE_MISSING
    return Verdict(
        cell_id=plan.cell.id,
        claim=Claim.KEEPS_A_GENERATION,
        word=VerdictWord.UNSUPPORTED if proven else VerdictWord.UNPROVEN,
        reason=reason,
        explanation=text,
        blame_item=Item.GENERATION,
        blame_subject=f"{rows[0]['id']} and {len(rows) - 1} more" if rows[1:] else rows[0]["id"],
        next_move=move,
    )


def _unproven(plan: Plan, reason: Reason, text: str, move: str) -> Verdict:
    return Verdict(
        cell_id=plan.cell.id,
        claim=Claim.KEEPS_A_GENERATION,
        word=VerdictWord.UNPROVEN,
        reason=reason,
        explanation=text,
        next_move=move,
    )
