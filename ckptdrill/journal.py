"""What has happened to each step, on disk before anything builds on it; and the run's own folder.

A run is created under a name that no other run has, is written by one process at a time, and keeps
one fsynced line per change of a step. Reading them again tells which steps have ended for good; a
step that was only started is wiped and runs again, because half a launch is no evidence.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from ckptdrill.errors import UserError
from ckptdrill.model import Convert, Launch, Replay, Step
from ckptdrill.store import RunFolder, append_line, read_lines, safe_name

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ")


class StepState(StrEnum):
    """What happened to a step. Only `ended` survives a `--resume`, all others are tried again."""

    STARTED = "started"
    ENDED = "ended"  # with a reason: ended badly, as a restore that is refused does
    FAILED = "failed"  # ckptdrill could not do it
    SKIPPED = "skipped"  # what it needs was lost
    INTERRUPTED = "interrupted"
    LEFT_OUT = "left out"  # the time budget of the run was used up


@dataclass(frozen=True)
class Entry:
    """The latest word on a step, and why it ended badly, failed or was skipped."""

    state: StepState
    reason: str | None = None

    @property
    def lost(self) -> str | None:
        """Why nothing can build on this step; None when something can."""
        if self.state is StepState.ENDED:
            return self.reason
        return self.reason or self.state.value


def create(runs: Path, matrix_name: str, now: datetime) -> RunFolder:
    """A fresh folder `runs/<matrix>/<UTC time>`, and `latest` beside it pointing to it.

    Names sort in the order in which the runs began: where the clock stands still or has jumped
    back, the newest time is taken again, with a number. Raises UserError when the folder cannot be
    written.
    """
    parent = runs / safe_name(matrix_name)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        known = [name[0] for path in parent.iterdir() if (name := _STAMP.match(path.name))]
        stamp = max((now.strftime("%Y-%m-%dT%H-%M-%SZ"), *known))
        for number in itertools.count(1):
            root = parent / (stamp if number == 1 else f"{stamp}-{number:03d}")
            try:
                root.mkdir()
            except FileExistsError:
                continue
            break
        _point_latest(parent, root.name)
    except OSError as error:
        raise UserError(
            f"cannot create a run folder: {error.strerror}",
            where=str(parent),
            hint="name a folder you may write with --runs",
        ) from error
    return RunFolder(root.resolve())


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Hold the run folder for this process; the kernel lets go of it when the process dies.

    Raises UserError when another process holds it, or when nothing can be written there.
    """
    try:
        descriptor = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"cannot write to this run: {error.strerror}",
            where=str(run.root),
            hint="free some space, or copy the folder to where you may write",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                "another ckptdrill process is writing this run",
                where=str(run.root),
                hint="wait for it to end, or stop it, then continue with --resume",
            ) from error
        yield
    finally:
        os.close(descriptor)


def record(run: RunFolder, step_id: str, state: StepState, reason: str | None = None) -> None:
    """Append one line and return when it is on disk. Raises UserError when the disk is full."""
    line = {"step": step_id, "state": state.value, "t": time.time()}
    append_line(run.journal, line if reason is None else {**line, "reason": reason})


def replay(run: RunFolder) -> dict[str, Entry]:
    """The latest entry of every step that the journal names."""
    latest: dict[str, Entry] = {}
    for _, line in read_lines(run.journal):
        if isinstance(line, dict) and {"step", "state"} <= line.keys():
            latest[str(line["step"])] = Entry(StepState(line["state"]), line.get("reason"))
    return latest


def settle(
    run: RunFolder, steps: Mapping[str, Step], known: Mapping[str, Entry] | None = None
) -> dict[str, Entry]:
    """The steps that need not run again; leftovers of all others are removed.

    A step counts only when its last line says that it ended, what it leaves behind is there, and
    whatever it built on still counts. `steps` hold dependencies before dependants; those `known`
    to be settled are taken as they are.
    """
    latest = replay(run)
    settled: dict[str, Entry] = dict(known or {})
    for step_id, step in steps.items():
        if step_id in settled:
            continue
        entry = latest.get(step_id)
        ended = entry is not None and entry.state is StepState.ENDED
        if entry and ended and _has_record(run, step) and all(o in settled for o in step.after):
            settled[step_id] = entry
        else:
            wipe(run, step)
    return settled


def wipe(run: RunFolder, step: Step) -> None:
    """Remove all that a step has written."""
    remove_tree(run.work(step.id))
    if isinstance(step, (Launch, Convert)):
        remove_tree(run.launch(step.id))
    if isinstance(step, Convert):
        run.conversion(step.id).unlink(missing_ok=True)
    elif isinstance(step, Replay):
        run.replay(step.id).unlink(missing_ok=True)
    elif not isinstance(step, Launch):
        run.damage(step.id).unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Remove `folder` if it is there, moved away first: a dying writer cannot put anything back."""
    if not folder.exists():
        return
    doomed = folder.with_name(f".{folder.name}.{time.time_ns()}.removed")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _has_record(run: RunFolder, step: Step) -> bool:
    if isinstance(step, Launch):
        return (run.launch(step.id) / "exit.json").exists()
    if isinstance(step, Replay):
        return run.replay(step.id).exists()
    if isinstance(step, Convert):
        return run.conversion(step.id).exists()
    return run.damage(step.id).exists()


def _point_latest(parent: Path, name: str) -> None:
    """Relative, so that the folder can be moved; renamed into place, so that it always points."""
    temporary = parent / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(parent / "latest")
