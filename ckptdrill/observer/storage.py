"""Makes the storage of this process slow or failing for a while, as the launch planned it.

What is written below `{out}` goes through Python files, `os.write` or `torch.save`; each is
replaced by one that asks the stall first. It begins with the first write after the wanted step, and
is over after so many seconds or writes. A write that fails does so as a disk does: a part of it is
written and counted, the next one raises. Each affected write is a fact on disk before it has its
effect. Files that other native code writes by itself are not reached; then nothing fires, and the
facts say so.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import re
import threading
import time
from typing import Any

import torch

from .facts import Recorder

_ERRORS = {"slow": 0, "eio": errno.EIO, "enospc": errno.ENOSPC, "timeout": errno.ETIMEDOUT}
_WAITS = ("slow", "timeout")
_LONGEST_WAIT_S = 1.0  # of one write: a save is many
_MOST_RECORDED = 200
_OUTPUT_BEFORE = {"out": 0, "err": 0}  # bytes of this rank's output when the stall began
_ADMITS = re.compile(
    r"(sav|checkpoint|ckpt|writ|stor)\w*\W.*\b(fail|error|could not|cannot|unable|retry)"
    r"|\b(fail|error|could not|cannot|unable|retry).*\b(sav|checkpoint|ckpt|writ|stor)",
    re.IGNORECASE,
)


class Stall:
    """When storage misbehaves, and how. Shared by all threads of the process."""

    def __init__(self, recorder: Recorder, launch: dict[str, Any]) -> None:
        fault = launch["fault"]
        planned = fault.get("parameters") or {}
        self.kind = fault["kind"]
        self.root = os.path.realpath(launch["out"]) + os.sep
        self._recorder = recorder
        self._from_step = int(planned.get("step", 0)) - int(launch.get("first_step") or 0)
        self._seconds = float(planned.get("seconds", 5.0))
        self._writes = int(planned.get("writes") or 0) or None
        self._lock = threading.Lock()
        self._began: float | None = None
        self._count = 0
        self._note = recorder.guarded(recorder.record_durably)

    def covers(self, path: Any) -> bool:
        """Whether `path`, or what an open descriptor refers to, lies below `{out}`."""
        try:
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(self.root)
        except (OSError, TypeError, ValueError):
            return False

    def hit(self, operation: str, path: Any, size: int) -> int:
        """Called before each write: waits if it has to; the errno to fail with, or 0."""
        if self._recorder.step < self._from_step:
            return 0
        with self._lock:
            now = time.monotonic()
            self._began = self._began or now
            left_s = self._began + self._seconds - now
            if left_s <= 0 or (self._writes is not None and self._count >= self._writes):
                return 0
            self._count += 1
            number = self._count
        if number <= _MOST_RECORDED:
            self._record(number, operation, str(path).removeprefix(self.root), size)
        if self.kind in _WAITS:
            time.sleep(min(left_s, _LONGEST_WAIT_S))
        return _ERRORS[self.kind]

    def _record(self, number: int, operation: str, path: str, size: int) -> None:
        if number == 1:  # what the job says of it stands in its output from here on
            _OUTPUT_BEFORE.update({"out": os.fstat(1).st_size, "err": os.fstat(2).st_size})
        where = {"operation": operation, "path": path, "size_bytes": size}
        self._note("fault_fired", fault=self.kind, number=number, **where)

    def fail(self, operation: str, path: Any, size: int) -> None:
        """`hit`, and raise what it says."""
        code = self.hit(operation, path, size)
        if code:
            raise OSError(code, os.strerror(code), str(path))


def install(recorder: Recorder, launch: dict[str, Any]) -> None:
    """Put the stall of `launch` in place, if it has one for this rank.

    Called before the hooks are, which wrap what stands here then.
    """
    fault = launch.get("fault") or {}
    if fault.get("kind") not in _ERRORS or fault.get("rank") not in (None, recorder.rank):
        return
    stall = Stall(recorder, launch)
    for part in (_files, _descriptors, _torch_save):
        part(stall)


def conclude(recorder: Recorder, launch: dict[str, Any]) -> None:
    """At the end of the process: did the job say anywhere that its storage failed?"""
    line = recorder.guarded(told)(launch, recorder.rank)
    if line is not None:
        recorder.guarded(recorder.record)("fault_told", **line)


def told(launch: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """The first line of this rank's output since the stall began in which the job says that a write
    or save failed.
    """
    fault = launch.get("fault") or {}
    code = _ERRORS.get(str(fault.get("kind")), 0)
    if not code:
        return None
    said = (os.strerror(code), f"Errno {code}", errno.errorcode[code])
    for ending in ("err", "out"):
        name = f"rank{rank}.{ending}"
        with open(os.path.join(launch["folder"], name), "rb") as output:
            output.seek(_OUTPUT_BEFORE[ending])
            for line in output:
                text = line.decode("utf-8", "replace").strip()
                if any(word in text for word in said) or _ADMITS.search(text):
                    return {"file": name, "text": text[:400]}
    return None


# --------------------------------------------------------------------- files that Python writes


def _files(stall: Stall) -> None:
    plain = io.open

    class Stalled(io.FileIO):
        """A raw file whose writes ask the stall first."""

        torn = False

        def write(self, data: Any) -> Any:
            view = memoryview(data).cast("B")
            code = stall.hit("write", self.name, len(view))
            if not code:
                return super().write(view)
            if len(view) > 1 and not self.torn:
                self.torn = True  # what a full disk does: a part is written, the next call fails
                return super().write(view[: len(view) // 2])
            raise OSError(code, os.strerror(code), str(self.name))

    @functools.wraps(plain)
    def stalled_open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+") or not stall.covers(file):
            return plain(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = Stalled(file, "".join(c for c in mode if c not in "bt"), closefd, opener)
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)

    io.open = builtins.open = stalled_open


def _descriptors(stall: Stall) -> None:
    for name in ("write", "pwrite", "fsync", "fdatasync"):
        setattr(os, name, _asking(stall, name, getattr(os, name)))


def _asking(stall: Stall, name: str, plain: Any) -> Any:
    @functools.wraps(plain)
    def call(descriptor: Any, *args: Any) -> Any:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if stall.covers(number):
            path = os.readlink(f"/proc/self/fd/{number}")
            stall.fail(name, path, len(args[0]) if args else 0)
        return plain(descriptor, *args)

    return call


def _torch_save(stall: Stall) -> None:
    """`torch.save(path)` writes in C++; given an open file, it writes the same through that."""
    plain = torch.save

    @functools.wraps(plain)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, (str, os.PathLike)) or not stall.covers(f):
            return plain(obj, f, *args, **kwargs)
        with open(f, "wb") as stream:
            return plain(obj, stream, *args, **kwargs)

    torch.save = save
