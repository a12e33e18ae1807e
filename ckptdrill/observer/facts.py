"""Write facts: one JSON line each, appended with a single write so that a kill tears at most one.

A fact is {"fact": kind, "t": unix seconds, "rank": int, "step": training steps completed in this
process, ...}. Times never go back: they are those of the clock when the process began, and count on
whatever is done to the clock. Facts that found no room are counted, and every later one says so
(`lost`). Nothing here has an opinion; the judge reads the lines later.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
import traceback
from typing import Any, Callable, TypeVar

from .columns import Columns

_MAX_TEXT = 4000  # characters of one exception message; the whole traceback is in rank<R>.err
_ITS_OWN = ("took_s", "path")  # what no other launch has in common with this one
_EPOCH_S = time.time() - time.monotonic()
F = TypeVar("F", bound=Callable[..., Any])


class Recorder:
    """The fact file of this rank."""

    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        self.step = 0
        self.lost = 0
        self._torn = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._failed: set[str] = set()
        self.columns = Columns(self.record)

    def record(self, kind: str, **data: Any) -> None:
        """Append one fact. Values must be JSON; others are written as their text.

        What is this launch's own stands first, so that a reader finds the rest in one piece.
        """
        now_s = _EPOCH_S + time.monotonic()
        own = {name: data.pop(name) for name in _ITS_OWN if name in data}
        line = {"fact": kind, "t": now_s, "rank": self.rank, "step": self.step, **own, **data}
        if self.lost:
            line["lost"] = self.lost
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            line["thread"] = thread.name
        text = json.dumps(line, default=str, separators=(",", ":"))
        self._append(text.encode("utf-8", "replace") + b"\n")

    def _append(self, line: bytes) -> None:
        """One write. On a full disk it fails or is cut short: then the next line begins afresh."""
        begun = b"\n" + line if self._torn else line
        try:
            self._torn = os.write(self._descriptor, begun) < len(begun)
            self.lost += self._torn
        except OSError:
            self.lost += 1

    def record_durably(self, kind: str, **data: Any) -> None:
        """`record`, and return only when the fact is on disk."""
        self.record(kind, **data)
        try:
            os.fsync(self._descriptor)
        except OSError:
            self.lost += 1

    def failed(self, where: str, error: BaseException) -> None:
        """The observer itself failed at `where`: recorded once per place, never raised."""
        if where in self._failed:
            return
        self._failed.add(where)
        try:
            self.record(
                "observer_failed",
                where=where,
                error=chain(error),
                traceback=traceback.format_exc()[-_MAX_TEXT:],
            )
        except Exception:
            pass

    def guarded(self, function: F) -> F:
        """Wrap an observation so that its failure becomes a fact and never reaches the job."""

        @functools.wraps(function)
        def safe(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.failed(function.__qualname__, error)
                return None

        return safe  # type: ignore[return-value]


def chain(error: BaseException | None) -> list[dict[str, Any]]:
    """An exception with its causes, outermost first.

    torch's CheckpointException says only which ranks failed; the cause sits in its `failures`
    (rank -> (exception, traceback)), so those are listed too, each with its rank.
    """
    links: list[dict[str, Any]] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(links) < 16:
        seen.add(id(error))
        links.append(_link(error))
        for rank, failure in _failures(error):
            cause = failure[0] if isinstance(failure, tuple) else failure
            if isinstance(cause, BaseException):
                links.append({**_link(cause), "failed_rank": rank})
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return links


def _failures(error: BaseException) -> list[tuple[Any, Any]]:
    """Ranks and their failures. Any exception may have an attribute of that name, of any kind."""
    try:
        failures = getattr(error, "failures", None)
        known = failures.items() if isinstance(failures, dict) else ()
        return sorted(known, key=lambda item: (len(str(item[0])), str(item[0])))
    except Exception:
        return []


def _link(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    try:
        message = str(error)
    except Exception:
        message = "(its message could not be formatted)"
    return {"type": f"{kind.__module__}.{kind.__qualname__}", "message": message[:_MAX_TEXT]}


def leave(code: int) -> None:
    """End this process at once. A finished rank can hang in its teardown; its facts are on disk."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
