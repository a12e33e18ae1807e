"""Interrupt this process at one file event of a save, and leave word of it on disk first.

The fault of a launch names a rank and the number of an event. When that rank comes to it, it waits
until the other ranks do nothing any more, so that they are where they can get without it; writes
and fsyncs what it is about to do; and is gone. SIGKILL shows what the death of a process leaves,
not what the loss of power does.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from .facts import Recorder

_QUIET_S = 0.3
_LONGEST_WAIT_S = 10.0
_LOOK_EVERY_S = 0.02
_HEARD_WITHIN_S = 2.0
_INTERRUPTING = ("kill", "torn", "terminate", "leave")


class Fault:
    """The fault of this rank. `event` is the number of the file event before which it strikes."""

    def __init__(self, plan: dict[str, Any], folder: str, rank: int) -> None:
        self.kind = plan["kind"]
        self.event = plan.get("event")
        self.leaves = self.kind == "leave"
        self._sizes: dict[str, int] = dict(plan.get("parameters", {}).get("sizes", {}))
        self._folder = folder
        self._own = f"rank{rank}.jsonl"

    def strikes_at(self, number: int | None) -> bool:
        """Whether `number` is the event before which this process is to be interrupted."""
        return number is not None and number == self.event and not self.leaves

    def strike(self, recorder: Recorder, root: str, event: dict[str, Any]) -> None:
        """Record the fault, then interrupt. Comes back only where the process may still react."""
        if not self.leaves:
            self._wait_for_others()
        for path, size in self._sizes.items():
            os.truncate(os.path.join(root, path), size)
        recorder.record_durably("fault_fired", fault=self.kind, cut=self._sizes, **event)
        self.event = None  # a process that goes on must not be struck again
        if self.kind == "terminate":
            os.kill(os.getppid(), signal.SIGTERM)  # torchrun passes it on, as under a scheduler
            time.sleep(_HEARD_WITHIN_S)
        elif self.leaves:
            os._exit(0)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_others(self) -> None:
        """Until no other rank has recorded anything for a while."""
        end = time.monotonic() + _LONGEST_WAIT_S
        seen, since = self._written_by_others(), time.monotonic()
        while time.monotonic() < end and time.monotonic() - since < _QUIET_S:
            time.sleep(_LOOK_EVERY_S)
            now = self._written_by_others()
            if now != seen:
                seen, since = now, time.monotonic()

    def _written_by_others(self) -> dict[str, int]:
        names = [n for n in os.listdir(self._folder) if n.endswith(".jsonl") and n != self._own]
        return {name: os.stat(os.path.join(self._folder, name)).st_size for name in names}


def planned(launch: dict[str, Any], rank: int) -> Fault | None:
    """The fault that `launch` has for this rank; None when it has none, or one of another kind."""
    plan = launch.get("fault")
    if not plan or plan["kind"] not in _INTERRUPTING or plan.get("rank") not in (None, rank):
        return None
    return Fault(plan, launch["folder"], rank)
