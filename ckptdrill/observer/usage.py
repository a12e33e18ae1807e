"""What this process holds at the moment: memory, threads, and saves that have not ended.

An asynchronous save that meets slow storage holds a copy of the state until it has ended. Whether
such saves pile up shows in these numbers, step by step, beside those of an undisturbed run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usage(saves: Iterable[Any]) -> dict[str, int]:
    """Resident memory in bytes, Python threads, and how many of `saves` are not done."""
    with open("/proc/self/statm", "rb") as stream:
        resident_pages = int(stream.read().split()[1])
    return {
        "rss_bytes": resident_pages * _PAGE_BYTES,
        "threads": threading.active_count(),
        "saves_in_flight": sum(not uploaded(save).done() for save in saves),
    }


def uploaded(save: Any) -> Any:
    """The future that is done when an asynchronous save is on storage."""
    return getattr(save, "upload_completion", save)
