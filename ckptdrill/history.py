"""What the stored runs of one matrix found: read once, and then asked by pure functions.

A run folder is the truth; of a run whose folder was removed to make room, one line of
`history.jsonl` remains. From both: which cells changed, which are flaky, whose evidence is the
oldest, which resume point is the newest that a drill has proved. Times are unix seconds of the
wall clock. A time in the future shows that a clock was moved: it makes nothing fresh.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.model import Claim, JsonValue, Reason, VerdictWord, from_json, to_json
from ckptdrill.store import RunFolder, append_line, read_json, read_lines

RETIRED_NAME = "history.jsonl"
_RUN_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\d{3})?")
_HASH_SHOWN = 12
# Words of run.json that say how a run went on: it begins as started, and ends as judged.
STARTED, JUDGED = "started", "judged"


@dataclass(frozen=True)
class Save:
    """The save that a cell restored: `call` of the job, its step, when it came back."""

    call: str | None = None
    step: int | None = None
    ended_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What one run found of one cell. `plan` is a digest of what was to be done."""

    cell: str
    word: VerdictWord
    reason: Reason
    expected: bool
    claim: Claim
    item: str | None = None
    subject: str | None = None
    explanation: str = ""
    plan: str = ""
    save: Save = Save()

    @property
    def executed(self) -> bool:
        """Whether the run says anything of the cell."""
        return self.reason is not Reason.NOT_RUN

    @property
    def found(self) -> tuple[str, str]:
        """Verdict and reason, by which two runs are compared."""
        return self.word.value, self.reason.value


@dataclass(frozen=True)
class PastRun:
    """One run. `settings` are by name what may explain a change: versions, code, matrix, node."""

    name: str
    root: str
    matrix: str = ""
    status: str = ""
    started_s: float | None = None
    ended_s: float | None = None
    nightly: bool = False
    source_unchanged: bool | None = None
    settings: Mapping[str, str] | None = None
    outcomes: tuple[Outcome, ...] = ()
    problem: str | None = None  # why it could not be read
    retired: bool = False  # its folder is gone

    @property
    def by_cell(self) -> Mapping[str, Outcome]:
        """The outcomes by cell id."""
        return {outcome.cell: outcome for outcome in self.outcomes}

    def dated_s(self, now_s: float) -> float | None:
        """When its evidence was complete; None when that is not known or lies in the future."""
        ended_s, started_s = self.ended_s, self.started_s
        if ended_s is None or started_s is None or not started_s <= ended_s <= now_s:
            return None
        return ended_s


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that was saved, committed, and restored by a cell that passed."""

    run: str
    cell: str
    step: int
    saved_s: float


# --------------------------------------------------------------------------------------------------
# Reading


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of a run, or one of its files beside run.json."""
    root = path.parent if path.is_file() else path
    return (root / "run.json").is_file() and (root / "cells").is_dir()


def read_all(folder: Path) -> tuple[PastRun, ...]:
    """Every run of one matrix, `runs/NAME`, in the order in which they began, newest first.

    Folder names sort in that order also when the clock was put back.
    """
    there = [path for path in _entries(folder) if _is_run_folder(path)]
    runs = {run.name: run for run in _retired(folder)}
    runs |= {path.name: read(path) for path in there}
    return tuple(runs[name] for name in sorted(runs, reverse=True))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_run_folder(path: Path) -> bool:
    return bool(_RUN_NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def read(root: Path) -> PastRun:
    """One run. What cannot be read is named in `problem`, never left out."""
    try:
        about = read_json(root / "run.json")
        if not isinstance(about, dict):
            return PastRun(root.name, str(root), problem="run.json is not that of a run")
        return _read(root, about)
    except UserError as error:
        return PastRun(root.name, str(root), problem=error.what)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return PastRun(root.name, str(root), problem=f"cannot be read: {error}")


def _read(root: Path, about: Mapping[str, Any]) -> PastRun:
    folders = sorted((root / "cells").glob("*/plan.json"))
    unchanged = about.get("source_unchanged")
    return PastRun(
        name=root.name,
        root=str(root),
        matrix=str(about.get("matrix", "")),
        status=str(about.get("status", "")),
        started_s=_unix_s(about.get("started_utc")),
        ended_s=_unix_s(about.get("ended_utc")),
        nightly=about.get("nightly") is True,
        source_unchanged=unchanged if isinstance(unchanged, bool) else None,
        settings=dict(_settings(RunFolder(root), about)),
        outcomes=tuple(_outcome(path.parent) for path in folders),
    )


def _outcome(cell: Path) -> Outcome:
    """A cell that has no verdict, or one that cannot be read, has not run."""
    plan = hashlib.sha256((cell / "plan.json").read_bytes()).hexdigest()
    try:
        return _judged(cell.name, plan, read_json(cell / "verdict.json"))
    except (UserError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Outcome(
            cell.name,
            VerdictWord.UNPROVEN,
            Reason.NOT_RUN,
            expected=False,
            claim=Claim.CONTINUES,
            explanation="no verdict was written",
            plan=plan,
        )


def _judged(name: str, plan: str, verdict: Mapping[str, Any]) -> Outcome:
    numbers = verdict.get("numbers")
    return Outcome(
        cell=name,
        word=VerdictWord(verdict["word"]),
        reason=Reason(verdict["reason"]),
        expected=verdict.get("expected") is True,
        claim=Claim(verdict["claim"]),
        item=verdict.get("blame_item"),
        subject=verdict.get("blame_subject"),
        explanation=str(verdict.get("explanation", "")),
        plan=plan,
        save=_save(numbers.get("save") if isinstance(numbers, dict) else None),
    )


def _save(found: JsonValue) -> Save:
    if not isinstance(found, dict):
        return Save()
    step, ended_s = found.get("step"), found.get("ended_s")
    return Save(
        found.get("call"),
        step if isinstance(step, int) else None,
        float(ended_s) if isinstance(ended_s, (int, float)) else None,
    )


def _settings(run: RunFolder, about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """All that a run recorded of what it ran with."""
    for name, versions in _pairs(about.get("environments")):
        yield from ((f"{name}: {key}", str(value)) for key, value in _pairs(versions) if value)
    for name, versions in _pairs(about.get("installed")):
        yield from ((f"{name}: {key} installed", str(value)) for key, value in _pairs(versions))
    for key, value in _pairs(about.get("versions")):
        yield ("ckptdrill" if key == "ckptdrill" else f"ckptdrill: {key}", str(value))
    for key, value in _pairs(about.get("node")):
        yield f"node: {key}", str(value)
    named = {"training code": "program_sha256", "git commit": "git_head", "image": "image_digest"}
    for name, key in named.items():
        if about.get(key):
            yield name, str(about[key])[:_HASH_SHOWN]
    if run.matrix.is_file():
        yield "matrix", hashlib.sha256(run.matrix.read_bytes()).hexdigest()[:_HASH_SHOWN]


def _pairs(value: JsonValue) -> list[tuple[str, JsonValue]]:
    return sorted(value.items()) if isinstance(value, dict) else []


def _unix_s(utc: JsonValue) -> float | None:
    try:
        return datetime.fromisoformat(str(utc)).timestamp()
    except ValueError:
        return None


def retire(folder: Path, run: PastRun) -> None:
    """Keep what a run found, on disk before this returns: its folder may then be removed.

    Raises UserError when it cannot be written.
    """
    append_line(folder / RETIRED_NAME, to_json(replace(run, retired=True)))


def _retired(folder: Path) -> Iterator[PastRun]:
    for _, line in read_lines(folder / RETIRED_NAME):
        try:
            yield from_json(PastRun, line)
        except (TypeError, ValueError, KeyError):
            continue  # torn, or of another make


# --------------------------------------------------------------------------------------------------
# Asking


def newest_evidence(runs: Sequence[PastRun], cell: str) -> tuple[PastRun, Outcome] | None:
    """The newest run, and what it found, that says anything of a cell."""
    for run in runs:
        outcome = run.by_cell.get(cell)
        if outcome is not None and outcome.executed:
            return run, outcome
    return None


def newest_resume_point(runs: Iterable[PastRun], now_s: float) -> ResumePoint | None:
    """The newest synchronous save that a passed cell has restored, of a run whose sources stayed as
    they were. What is dated in the future, or after the end of its own run, does not count.
    """
    found = [
        ResumePoint(run.name, outcome.cell, outcome.save.step, outcome.save.ended_s)
        for run in runs
        if run.source_unchanged is True and run.status == JUDGED
        for outcome in run.outcomes
        if outcome.word is VerdictWord.PASS and outcome.claim is Claim.CONTINUES
        if outcome.save.call != "async_save"
        if outcome.save.step is not None and outcome.save.ended_s is not None
        if outcome.save.ended_s <= min(now_s, run.ended_s or now_s)
    ]
    return max(found, key=lambda point: point.saved_s, default=None)


def by_value(cells: Iterable[str], runs: Sequence[PastRun], now_s: float) -> tuple[str, ...]:
    """Cells in the order in which a short run tries them: never run, failed last, oldest evidence.

    Evidence without a date that can be true is the oldest.
    """

    def turn(cell: str) -> tuple[int, float]:
        found = newest_evidence(runs, cell)
        if found is None:
            return 0, 0.0
        run, outcome = found
        dated_s = run.dated_s(now_s)
        return (2 if outcome.expected else 1), -1.0 if dated_s is None else dated_s

    return tuple(sorted(cells, key=turn))


def flaky(runs: Sequence[PastRun], cell: str) -> tuple[PastRun, PastRun] | None:
    """The newest two runs in a row that judged a cell differently, although everything that they
    recorded of what ran is the same; None when a change explains each difference.
    """
    told = [run for run in runs if cell in run.by_cell and run.by_cell[cell].executed]
    for newer, older in itertools.pairwise(told):
        now, before = newer.by_cell[cell], older.by_cell[cell]
        same = newer.settings == older.settings and now.plan == before.plan
        if same and now.found != before.found:
            return newer, older
    return None


def ahead_of(runs: Iterable[PastRun], now_s: float) -> PastRun | None:
    """A run that is dated after `now_s`: the clock has been put back since, or was ahead then."""
    for run in runs:
        if max(run.started_s or 0.0, run.ended_s or 0.0) > now_s:
            return run
    return None
