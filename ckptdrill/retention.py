"""Which old runs of a matrix may go, and how they go: nothing that somebody may still need.

Pure choice first: a run is removed only when `ckptdrill nightly` began it, it is beyond both
limits, and neither the newest evidence of any cell, nor its newest Pass, nor the newest resume
point rests on it. Then each is written down in `history.jsonl`, moved aside and deleted. A folder
that holds a file which no run writes is left alone, and so is one that a process holds.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptdrill import history, journal
from ckptdrill.errors import UserError
from ckptdrill.history import PastRun
from ckptdrill.model import VerdictWord
from ckptdrill.store import (
    COMPATIBILITY_NAME,
    MANIFEST_NAME,
    SEAL_NAME,
    SEALED,
    RunFolder,
    evidence_files,
)

_DAY_S = 86_400.0
_DOOMED = re.compile(r"\.\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\d{3})?\.\d+\.removed")
_LIST_LINE = re.compile(r"[0-9a-f]{64}  (.+)")
# What a run writes into its folder, at the top and below; the files of an unfinished run have no
# list by which they could be told from those of somebody else.
_TOP = frozenset(
    {"cells", "conversions", "damages", "launches", "observer", "replays", "warm", "work"}
    | {"run.json", "matrix.yaml", "journal.jsonl", "sources.json", "source.manifest.json", ".lock"}
    | {"index.html", "packet.json", "packet.md", "junit.xml", "metrics.prom"}
    | {COMPATIBILITY_NAME, SEAL_NAME, *SEALED}
)


@dataclass(frozen=True)
class Limits:
    """A run stays while it is one of the newest `runs`, or, where `days` is given, younger."""

    runs: int = 30
    days: float | None = None


def removable(runs: Sequence[PastRun], limits: Limits, now_s: float) -> tuple[PastRun, ...]:
    """The runs that may go; `runs` are newest first."""
    needed = _needed(runs, now_s)
    return tuple(
        run
        for run in runs[max(1, limits.runs) :]
        if run.nightly and not run.retired and run.problem is None and run.name not in needed
        if limits.days is None or _is_older(run, limits.days, now_s)
    )


def _is_older(run: PastRun, days: float, now_s: float) -> bool:
    """A run whose date cannot be true has no age, so it is not old."""
    began_s = run.started_s
    return began_s is not None and began_s <= now_s and now_s - began_s > days * _DAY_S


def _needed(runs: Sequence[PastRun], now_s: float) -> set[str]:
    """The runs on which the newest evidence rests, of each cell that the newest run has."""
    point = history.newest_resume_point(runs, now_s)
    names = {point.run} if point else set()
    for cell in runs[0].by_cell if runs else ():
        evidence = history.newest_evidence(runs, cell)
        passed = next((run.name for run in runs if _passed(run, cell)), None)
        names |= {name for name in (evidence and evidence[0].name, passed) if name}
    return names


def _passed(run: PastRun, cell: str) -> bool:
    outcome = run.by_cell.get(cell)
    return outcome is not None and outcome.word is VerdictWord.PASS


def make_room(folder: Path, runs: Sequence[PastRun], limits: Limits, now_s: float) -> Iterator[str]:
    """Remove what may go, and the checkpoints of all runs but the newest; one line for each run
    that went, or that had to stay.

    Raises UserError when `history.jsonl` cannot be written: nothing is removed then.
    """
    for leftover in folder.iterdir():
        if _DOOMED.fullmatch(leftover.name) and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)  # an earlier removal was cut off
        elif history.is_run_folder(leftover):
            with contextlib.suppress(OSError):
                leftover.rmdir()  # only an empty one goes: the disk was full when it began
    _drop_checkpoints(runs[1:])
    for run in removable(runs, limits, now_s):
        why = why_it_stays(Path(run.root))
        if why is not None:
            yield f"not removed: {run.name}: {why}"
            continue
        history.retire(folder, run)
        journal.remove_tree(Path(run.root))
        yield f"removed {run.name}, which is beyond the limits of retention"


def _drop_checkpoints(runs: Sequence[PastRun]) -> None:
    """Checkpoints under drill are no evidence, and those of one run show what there is to see."""
    for run in runs:
        if run.nightly and not run.keep and not run.retired and run.status == history.JUDGED:
            with contextlib.suppress(UserError, OSError), journal.locked(RunFolder(Path(run.root))):
                journal.remove_tree(Path(run.root) / "work")


def why_it_stays(root: Path) -> str | None:
    """What speaks against removing a run folder, in words; None when all of it is a run's own."""
    foreign = sorted(path.name for path in root.iterdir() if path.name not in _TOP)
    foreign = foreign or list(_unlisted(root))
    if foreign:
        return f"{foreign[0]} in it was not written by the run"
    try:
        with journal.locked(RunFolder(root)):
            return None
    except UserError as error:
        return error.what


def _unlisted(root: Path) -> Iterator[str]:
    try:
        text = (root / MANIFEST_NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    listed = {found[1] for line in text.splitlines() if (found := _LIST_LINE.fullmatch(line))}
    for path in evidence_files(root):
        name = path.relative_to(root).as_posix()
        if name not in listed:
            yield name
