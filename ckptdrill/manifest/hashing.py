"""Hashes many files at once, and notices when one changes under the reader.

Files are hashed side by side, the largest first, each one sequentially, since SHA-256 has no
parallel form that `sha256sum` would agree with. Whether a file changed is told by its size, times
and inode before and after.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ckptdrill.manifest import files, helpers
from ckptdrill.manifest.files import Stamp
from ckptdrill.manifest.record import Problem, ProblemError, ProblemKind

# Large enough that the system calls do not show, small enough to stay in a core's own cache.
_BLOCK_BYTES = 1 << 20
_LOOK_S = 0.5  # between looks for an interrupt


@dataclass(frozen=True)
class Digest:
    """The SHA-256 of a file, in hex, and the stamp it had before and after."""

    sha256: str
    stamp: Stamp


def digests(
    root: Path, sizes: Mapping[str, int], *, workers: int | None = None
) -> dict[str, Digest | Problem]:
    """The digest of each file below `root` in `sizes` (relative path to bytes), or the problem:
    those of `files.open_inside`, and `changed-while-read`. `workers` files are hashed at a time,
    default one per core of this process.
    """
    results: dict[str, Digest | Problem] = {}
    stop = threading.Event()
    count = workers or len(os.sched_getaffinity(0))

    def sha256(descriptor: int, size_bytes: int) -> tuple[str, int]:
        told = quick.sha256(descriptor, size_bytes)
        return (told, size_bytes) if told else _sha256(descriptor, size_bytes, stop)

    def one(relative: str) -> None:
        try:
            results[relative] = _digest(root, relative, sha256)
        except ProblemError as refused:
            results[relative] = refused.problem

    with helpers.started(count, sum(sizes.values())) as quick:
        _in_threads(one, sorted(sizes, key=lambda path: (-sizes[path], path)), count, stop)
    return results


def _digest(root: Path, relative: str, sha256: Callable[[int, int], tuple[str, int]]) -> Digest:
    descriptor = files.open_inside(root, relative)
    try:
        before = Stamp.of(os.fstat(descriptor))
        found, read_bytes = sha256(descriptor, before.size_bytes)
        after = Stamp.of(os.fstat(descriptor))
    except OSError as error:
        raise files.refusal(relative, error) from error
    finally:
        os.close(descriptor)
    if before != after or read_bytes != before.size_bytes:
        what = "size, time or inode moved while it was read"
        raise ProblemError(ProblemKind.CHANGED_WHILE_READ, relative, what)
    return Digest(found, before)


def _sha256(descriptor: int, size_bytes: int, stop: threading.Event) -> tuple[str, int]:
    """(SHA-256, bytes read) of an open file; ends soon after `size_bytes` if it grows, and when
    told to `stop`.
    """
    sha256 = hashlib.sha256(usedforsecurity=False)
    block = memoryview(bytearray(min(_BLOCK_BYTES, size_bytes + 1)))
    done = 0
    while done <= size_bytes and not stop.is_set() and (got := os.readv(descriptor, [block])):
        sha256.update(block[:got])
        done += got
    return sha256.hexdigest(), done


def _in_threads(
    work: Callable[[str], None], items: Iterable[str], workers: int, stop: threading.Event
) -> None:
    """Call `work` on every item, `workers` at a time, in the order given.

    The first exception, also an interrupt of this thread, sets `stop` and is raised.
    """
    todo, taking = iter(items), threading.Lock()

    def take() -> None:
        while not stop.is_set():
            with taking:
                item = next(todo, None)
            if item is None:
                return
            work(item)

    with ThreadPoolExecutor(workers) as pool:
        try:
            pending = {pool.submit(take) for _ in range(workers)}
            while pending:  # with a timeout: who is just beginning to wait misses a signal
                done, pending = wait(pending, _LOOK_S, return_when=FIRST_EXCEPTION)
                for each in done:
                    each.result()
        finally:
            stop.set()
