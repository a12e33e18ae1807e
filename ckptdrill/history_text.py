"""What `ckptdrill history` prints, and `ckptdrill diff` of two runs: runs side by side, in words.

The verbs read the runs first; then each line is made from them. All text of a run folder is shown
as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ckptdrill import changes, history
from ckptdrill.changes import Change, Changes
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.history import Outcome, PastRun
from ckptdrill.model import Reason, to_json
from ckptdrill.packet.text import visible

_NOTHING = "not in this run"


def show(folder: Path, *, cells: str, limit: int, as_json: bool) -> ExitCode:
    """Print the runs of one matrix, or of every matrix below `folder`, cell by cell.

    Raises UserError when there is no run, or no such cell.
    """
    found = {name: runs for name, runs in _matrices(folder) if runs}
    if not found:
        raise UserError(
            f"no run in {folder}",
            hint="name the folder that --runs named, or the folder of one matrix in it",
        )
    if not any(fnmatchcase(cell, cells) for runs in found.values() for cell in _cells(runs)):
        raise UserError(f"no cell is called {cells!r}", where=str(folder))
    if as_json:
        value = {name: _document(runs, cells, limit) for name, runs in found.items()}
        print(json.dumps(value, indent=1))  # noqa: T201 - the output of the verb
        return ExitCode.AS_EXPECTED
    for name, runs in found.items():
        for line in page(name, runs, cells, limit):
            print(line)  # noqa: T201 - same
    return ExitCode.AS_EXPECTED


def _matrices(folder: Path) -> Iterator[tuple[str, tuple[PastRun, ...]]]:
    """The folder of a run stands for that of its matrix."""
    root = folder.resolve().parent if history.is_run(folder) else folder
    here = history.read_all(root)
    if here:
        yield root.resolve().name, here
        return
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            yield path.name, history.read_all(path)


def _cells(runs: Sequence[PastRun]) -> list[str]:
    """Every cell of any run, those of the newest run first."""
    return list(dict.fromkeys(outcome.cell for run in runs for outcome in run.outcomes))


def _document(runs: Sequence[PastRun], cells: str, limit: int) -> dict[str, object]:
    chosen = [cell for cell in _cells(runs) if fnmatchcase(cell, cells)]
    unstable = {cell: history.flaky(runs, cell) for cell in chosen}
    kept = set(chosen)
    return {
        "runs": [
            {**to_json(run), "outcomes": [to_json(o) for o in run.outcomes if o.cell in kept]}
            for run in runs[:limit]
        ],
        "flaky": {cell: [run.name for run in pair] for cell, pair in unstable.items() if pair},
    }


# --------------------------------------------------------------------------------------------------
# The page


def page(name: str, runs: Sequence[PastRun], cells: str, limit: int) -> Iterator[str]:
    """The history of one matrix, line by line."""
    yield f"{visible(name)}: {len(runs)} runs, newest first"
    for run in runs[:limit]:
        yield f"  {run.name}  {_about(run)}"
    if len(runs) > limit:
        yield f"  … and {len(runs) - limit} older ones: --limit shows more"
    for cell in _cells(runs):
        if fnmatchcase(cell, cells):
            yield ""
            yield visible(cell) + _mark(runs, cell)
            yield from (f"  {line}" for line in _lines(runs[:limit], cell))
    yield ""


def _about(run: PastRun) -> str:
    if run.problem:
        return f"unreadable: {visible(run.problem)}"
    counts = {word: sum(o.word.value == word for o in run.outcomes) for word in _words(run)}
    said = ", ".join(f"{count} {word}" for word, count in counts.items()) or "no cell"
    ended = "" if run.status == history.JUDGED else f"; not finished ({visible(run.status)})"
    void = "; VOID: a source changed" if run.source_unchanged is False else ""
    gone = "; folder removed" if run.retired else ""
    return f"{said}{ended}{void}{gone}"


def _words(run: PastRun) -> list[str]:
    return sorted({outcome.word.value for outcome in run.outcomes})


def _mark(runs: Sequence[PastRun], cell: str) -> str:
    pair = history.flaky(runs, cell)
    if pair is None:
        return ""
    return f"  FLAKY: {pair[1].name} and {pair[0].name} differ, nothing that they record does"


def _lines(runs: Sequence[PastRun], cell: str) -> Iterator[str]:
    for number, run in enumerate(runs):
        outcome = run.by_cell.get(cell)
        if outcome is None:
            continue
        older = next((each for each in runs[number + 1 :] if cell in each.by_cell), None)
        yield f"{run.name}  {summary(outcome)}{_since(run, older, outcome, cell)}"


def _since(run: PastRun, older: PastRun | None, outcome: Outcome, cell: str) -> str:
    """What else changed, where the verdict did."""
    if older is None or older.by_cell[cell].found == outcome.found or not outcome.executed:
        return ""
    differing = changes.settings(older.settings or {}, run.settings or {})
    if not differing:
        return ""
    return f"  [{', '.join(setting_text(each) for each in differing)}]"


def summary(outcome: Outcome) -> str:
    """`Unsupported diverged: weights, layers.0.weight`."""
    text = f"{outcome.word.value:<11} {outcome.reason.value}"
    blame = ", ".join(visible(str(part)) for part in (outcome.item, outcome.subject) if part)
    return f"{text}: {blame}" if blame else text


def setting_text(each: changes.Setting) -> str:
    """`default: torch 2.12.0 -> 2.13.0`."""
    before, after = (visible(each.before or "none"), visible(each.after or "none"))
    return f"{visible(each.name)} {before} -> {after}"


# --------------------------------------------------------------------------------------------------
# Two runs


def diff(a: Path, b: Path, *, tolerance: float | None, as_json: bool) -> ExitCode:
    """Print what changed from run A to run B; AS_EXPECTED when no verdict did.

    Raises UserError when one of them is no run, or cannot be read, or a tolerance is given.
    """
    if tolerance is not None:
        raise UserError("--tolerance is for checkpoints, and these are runs")
    one, other = _run(a), _run(b)
    found = changes.between(one, other)
    if as_json:
        value = {"a": one.root, "b": other.root, **to_json(found)}
        print(json.dumps(value, indent=1))  # noqa: T201 - the output of the verb
    else:
        for line in compared(one, other, found):
            print(line)  # noqa: T201 - same
    return ExitCode.UNSUPPORTED if found.cells else ExitCode.AS_EXPECTED


def _run(path: Path) -> PastRun:
    if not history.is_run(path):
        raise UserError(
            f"{path} is not the folder of a run, and the other one is",
            hint="compare two runs, or two checkpoints",
        )
    root = path.parent if path.is_file() else path
    found = history.read(root.resolve())
    if found.problem:
        raise UserError(found.problem, where=str(path))
    return found


def compared(a: PastRun, b: PastRun, found: Changes) -> Iterator[str]:
    """The differences of two runs, line by line."""
    for name, run in (("A", a), ("B", b)):
        yield f"{name}  {visible(run.matrix)} {run.name}  {_about(run)}"
    for change in found.cells:
        yield from change_lines(change)
    yield from (f"changed: {setting_text(each)}" for each in found.settings)
    if found.unexplained:
        yield (
            "nothing that a run records has changed: repeat the run; if the cell changes again "
            "it is flaky, else look at what is outside (drivers, storage, load)"
        )
    count = len(found.cells) or "none"
    yield f"verdicts that changed: {count}; unchanged: {found.same}"


def change_lines(change: Change) -> Iterator[str]:
    """A cell, what it was and what it is, and the explanation of the newer verdict."""
    sides = (change.before, change.after)
    before, after = (" ".join(summary(each).split()) if each else _NOTHING for each in sides)
    yield f"{visible(change.cell)}: {before} -> {after}"
    told = change.after
    if told is not None and told.explanation and told.reason is not Reason.HELD:
        yield f"    {visible(told.explanation)}"
