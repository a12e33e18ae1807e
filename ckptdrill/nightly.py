"""One command for cron: drill a matrix again, within a time, keep what was found, make room.

In this order: take the lock of the matrix (a second one leaves at once), read what earlier runs
found, look whether the clock was put back, remove what is beyond the limits, continue a run that
was killed or begin another, drill the most valuable cells first until the budget is used up, judge
and render as `ckptdrill run` does, write the metrics, and say what has changed. Cells that there
was no time for are `not-run`. Nothing here makes a verdict better than its evidence.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptdrill import (
    __version__,
    changes,
    history,
    history_text,
    journal,
    retention,
    signing,
    textfile,
    timetables,
    verbs,
)
from ckptdrill import matrix as matrices
from ckptdrill import run as runs_
from ckptdrill.errors import ExitCode, UserError, worst
from ckptdrill.gate import age_s
from ckptdrill.history import JUDGED, PastRun, ResumePoint
from ckptdrill.installed import installed
from ckptdrill.launchers import Mode
from ckptdrill.matrix import Matrix
from ckptdrill.model import Plan, Reason
from ckptdrill.retention import Limits
from ckptdrill.store import RunFolder, read_json, safe_name, sha256_of, write_atomic
from ckptdrill.timetables import Kind

_LOCK_NAME = ".nightly.lock"
# A run that was killed is continued for so long; later, its first facts are no news any more.
_CONTINUED_WITHIN_S = 24 * 3600.0


@dataclass(frozen=True)
class Options:
    """What the command line says; `max_age` as in `7d`."""

    runs: Path
    python: str | None = None
    launcher: str = Mode.AUTO.value
    budget_s: float | None = None
    limits: Limits = field(default_factory=Limits)
    keep: bool = False
    metrics: Path | None = None
    max_age: str | None = None
    sign_key: Path | None = None
    image_digest: str | None = None


@dataclass(frozen=True)
class _Night:
    """One invocation: its matrix, where its runs are, and when it began by both clocks."""

    matrix: Matrix
    folder: Path
    options: Options
    began: float
    now_s: float


def nightly(path: Path, options: Options) -> ExitCode:
    """Drill the matrix at `path` as described above; the gravest exit code of its parts.

    Raises UserError with the code BUSY when another one is under way, and as `ckptdrill run` does.
    """
    began, now_s = time.monotonic(), time.time()
    _check(options)
    mode = verbs.launch_mode(options.launcher)
    key = signing.private_key(options.sign_key) if options.sign_key else None
    folder = options.runs / safe_name(_name(path))
    with alone(folder):
        matrix, plans = verbs.ready(path, options.python)
        night = _Night(matrix, folder, options, began, now_s)
        past = history.read_all(folder)
        _look_at_the_clock(past, now_s)
        for line in retention.make_room(folder, past, options.limits, now_s):
            _say(line)
        run = _continued(night, past) or _begun(night)
        chosen = _run_options(night, mode, plans, past)
        code = ExitCode.UNPROVEN
        try:
            code = verbs.carried_out(matrix, plans, run, chosen, key)
            code = worst(code, _age_code(night))
        except UserError as error:
            code = error.code
            raise
        finally:
            _write_metrics(night, code)
        _report(night, run)
        return code


def _name(path: Path) -> str:
    """The name of a matrix. Raises UserError for what is wrong with its text."""
    return matrices.parse(matrices.text_of(path), path).name


def _check(options: Options) -> None:
    if options.max_age is not None:
        age_s(options.max_age)
    if options.budget_s is not None and not 0 < options.budget_s < float("inf"):
        raise UserError(f"--budget-s {options.budget_s} is no time", hint="give seconds, as 3600")
    if options.limits.runs < 1:
        raise UserError("--keep-runs must be at least 1", hint="the newest run always stays")


def _say(text: str) -> None:
    Console(soft_wrap=True).print(Text(text))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a matrix; the kernel lets go of it when the process dies.

    Raises UserError with the code BUSY when another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(
            f"cannot write to the folder of runs: {error.strerror}",
            where=str(folder),
            hint="free some space, or name a folder you may write with --runs",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(folder) from error
        yield
    finally:
        os.close(descriptor)


def _busy(folder: Path) -> UserError:
    return UserError(
        "another run of this matrix is under way; this one did nothing",
        where=str(folder),
        hint="nothing, if that one ends; else give it a --budget-s below the time between two runs",
        code=ExitCode.BUSY,
    )


def _look_at_the_clock(past: Sequence[PastRun], now_s: float) -> None:
    ahead = history.ahead_of(past, now_s)
    if ahead is not None:
        _say(
            f"the clock is behind: the run {ahead.name} is dated after now "
            f"({_utc(now_s)}); its evidence counts as old until that date is past"
        )


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


# --------------------------------------------------------------------------------------------------
# Which run


def _continued(night: _Night, past: Sequence[PastRun]) -> RunFolder | None:
    """The newest run, if it did not end and may still go on; why not is said."""
    newest = past[0] if past else None
    if newest is None or newest.retired or newest.status == JUDGED:
        return None
    run = RunFolder(Path(newest.root).resolve())
    _refuse_if_at_work(run, night.folder)
    why_not = _why_not_continued(night, newest, run)
    if why_not is not None:
        _say(f"the run {newest.name} has not ended, and is not continued: {why_not}")
        return None
    _say(f"continues the run {newest.name}, which was stopped half-way")
    return run


def _refuse_if_at_work(run: RunFolder, folder: Path) -> None:
    if not run.lock.exists():
        return
    try:
        with journal.locked(run):
            return
    except UserError as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise _busy(folder) from error
        raise


def _why_not_continued(night: _Night, newest: PastRun, run: RunFolder) -> str | None:
    """None when what a killed run would still find is of one make with what it has found."""
    if newest.problem is not None:
        return newest.problem
    if not newest.nightly:
        return "it was begun by hand: `ckptdrill run MATRIX --resume` continues it"
    began_s = newest.started_s
    if began_s is None or not 0 <= night.now_s - began_s <= _CONTINUED_WITHIN_S:
        return "it did not begin within the last day"
    if not run.matrix.is_file() or run.matrix.read_bytes() != night.matrix.text:
        return "the matrix has changed since"
    return _difference(night, read_json(run.run_json))


def _difference(night: _Night, about: Mapping[str, Any]) -> str | None:
    """What has been exchanged since a run began, in words."""
    program = night.matrix.job.program
    now: dict[str, tuple[Any, Any]] = {
        "training code": (
            about.get("program_sha256"),
            sha256_of(Path(program)) if program else None,
        ),
        "image": (about.get("image_digest"), night.options.image_digest),
        "ckptdrill": ((about.get("versions") or {}).get("ckptdrill"), __version__),
    }
    environments = about.get("installed") or {}
    now |= {
        f"environment {name!r}": (environments.get(name), _packages(each.python))
        for name, each in night.matrix.environments.items()
    }
    changed = [name for name, (before, after) in now.items() if before != after]
    return f"{', '.join(changed)} changed since" if changed else None


def _packages(python: str) -> dict[str, str] | None:
    found = installed(python)
    return None if found is None else dict(found)


def _begun(night: _Night) -> RunFolder:
    now = datetime.fromtimestamp(night.now_s, UTC)
    run = journal.create(night.options.runs, night.matrix.name, now)
    marks = verbs.Marks(night.options.sign_key, night.options.image_digest, nightly=True)
    verbs.begin(run, night.matrix, resume=False, marks=marks)
    return run


def _run_options(
    night: _Night, mode: Mode, plans: Sequence[Plan], past: Sequence[PastRun]
) -> runs_.Options:
    """The budget is what is left of it; cells come in the order of their value."""
    options, budget_s = night.options, night.options.budget_s
    left_s = None if budget_s is None else budget_s - (time.monotonic() - night.began)
    order = history.by_value([plan.cell.id for plan in plans], past, night.now_s)
    return runs_.Options(
        launcher=mode, resume=True, keep=options.keep, budget_s=left_s, order=order
    )


# --------------------------------------------------------------------------------------------------
# Afterwards


def _age_code(night: _Night) -> ExitCode:
    """UNPROVEN when no resume point is as young as was asked for."""
    if night.options.max_age is None:
        return ExitCode.AS_EXPECTED
    now_s = time.time()
    point = history.newest_resume_point(history.read_all(night.folder), now_s)
    if point is not None and now_s - point.saved_s <= age_s(night.options.max_age):
        return ExitCode.AS_EXPECTED
    _say(f"ALERT: no drill-validated resume point is younger than {night.options.max_age}")
    return ExitCode.UNPROVEN


def _write_metrics(night: _Night, code: ExitCode) -> None:
    """Also when the run could not go on: an old file must not look like a quiet night."""
    if night.options.metrics is None:
        return
    now_s = time.time()
    past = history.read_all(night.folder)
    point = history.newest_resume_point(past, now_s)
    newest = past[0] if past else None
    text = textfile.render(night.matrix.name, point, newest, code, now_s)
    try:
        write_atomic(night.options.metrics, text)
        night.options.metrics.chmod(0o644)  # another user's collector reads it
    except (UserError, OSError) as error:
        _say(f"no metrics were written: {error}")


def _report(night: _Night, run: RunFolder) -> None:
    """What is new compared with the run before, what was left out, and the newest resume point."""
    past = history.read_all(night.folder)
    newest = next((each for each in past if Path(each.root).resolve() == run.root), None)
    if newest is None:
        return
    before = next((each for each in past if each.name < newest.name and _ended(each)), None)
    left_out = [each.cell for each in newest.outcomes if each.reason is Reason.NOT_RUN]
    if left_out:
        _say(f"not run: {len(left_out)} of {len(newest.outcomes)} cells; they are tried first next")
    if before is not None:
        _say_changes(before, newest)
    moved_s = read_json(run.run_json).get("clock_moved_s")
    if moved_s:
        _say(f"the clock was moved by {moved_s:+.0f} s during the run; dates in it are uncertain")
    now_s = time.time()
    _say(_in_words(history.newest_resume_point(past, now_s), now_s))


def _ended(run: PastRun) -> bool:
    return run.status == JUDGED and run.problem is None


def _say_changes(before: PastRun, newest: PastRun) -> None:
    found = changes.between(before, newest)
    told = [
        c for c in found.cells if c.before and c.after and c.before.executed and c.after.executed
    ]
    for change in told:
        for line in history_text.change_lines(change):
            _say(line)
    if told:
        for each in found.settings:
            _say(f"changed: {history_text.setting_text(each)}")


def _in_words(point: ResumePoint | None, now_s: float) -> str:
    if point is None:
        return "newest drill-validated resume point: none"
    hours = (now_s - point.saved_s) / 3600
    return (
        f"newest drill-validated resume point: step {point.step}, saved {hours:.1f} h ago, "
        f"by {point.cell} of {point.run}"
    )


# --------------------------------------------------------------------------------------------------
# What starts it


def printed(kind: Kind, path: Path, options: Options) -> ExitCode:
    """Print what starts this command every night: with full paths, except for a build server, which
    has a checkout of its own.
    """
    name = _name(path)
    here = kind in (Kind.CRON, Kind.SYSTEMD)
    program = shutil.which("ckptdrill") or str(Path(sys.executable).with_name("ckptdrill"))
    command = [program if here else "ckptdrill", "nightly", _place(path, here)]
    for option, value in _given(options, here):
        command += [option, value]
    user = getpass.getuser()
    print(timetables.render(kind, command, name, _place(options.runs, here), user), end="")  # noqa: T201 - the output
    return ExitCode.AS_EXPECTED


def _place(path: Path, here: bool) -> str:
    return str(path.absolute()) if here else str(path)


def _given(options: Options, here: bool) -> Iterator[tuple[str, str]]:
    """The options of the command line that a nightly start repeats."""
    yield "--runs", _place(options.runs, here)
    if options.python is not None:
        given = options.python
        yield "--python", _place(Path(given), here) if "/" in given else given
    plain = {
        "--budget-s": options.budget_s and f"{options.budget_s:g}",
        "--keep-days": options.limits.days and f"{options.limits.days:g}",
        "--max-age": options.max_age,
        "--image-digest": options.image_digest,
    }
    yield from ((name, value) for name, value in plain.items() if value)
    if options.limits.runs != Limits().runs:
        yield "--keep-runs", str(options.limits.runs)
    if options.launcher != Mode.AUTO:
        yield "--launcher", options.launcher
    for name, path in (("--metrics", options.metrics), ("--sign-key", options.sign_key)):
        if path is not None:
            yield name, _place(path, here)
