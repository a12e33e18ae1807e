"""Starts the processes of `hasher` and hands them files; without them everything still works.

A helper only ever saves time. It may be missing, refuse, or die in the middle of a file: then the
answer is None, and the caller reads the file itself.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ckptdrill.manifest import hasher

# Below this a copy costs less than asking.
_MIN_FILE_BYTES = 1 << 20
# Starting takes some 30 ms, the time of 50 MB.
_MIN_TOTAL_BYTES = 256 << 20


class Helpers:
    """The helpers that are idle, by their sockets; safe to use from many threads."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._idle: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for each in sockets:
            self._idle.put(each)

    def sha256(self, descriptor: int, size_bytes: int) -> str | None:
        """The hex SHA-256 of the first `size_bytes` of an open file; None if no helper can tell."""
        if size_bytes < _MIN_FILE_BYTES:
            return None
        try:
            helper = self._idle.get_nowait()
        except queue.Empty:
            return None
        try:
            socket.send_fds(helper, [size_bytes.to_bytes(8, "little")], [descriptor])
            answer = helper.recv(hasher.ANSWER_BYTES, socket.MSG_WAITALL)
        except OSError:
            return None
        if len(answer) != hasher.ANSWER_BYTES:
            return None  # it died; its socket is not put back
        self._idle.put(helper)
        return answer[1:].hex() if answer[0] else None


@contextlib.contextmanager
def started(count: int, total_bytes: int) -> Iterator[Helpers]:
    """`count` helpers for as long as the block runs; none for few bytes, or where they fail."""
    if total_bytes < _MIN_TOTAL_BYTES:
        yield Helpers([])
        return
    pairs = [socket.socketpair() for _ in range(count)]
    ours, theirs = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    process = None
    try:
        process = _start([each.fileno() for each in theirs])
        for each in theirs:
            each.close()
        yield Helpers(ours if process else [])
    finally:
        for each in (*ours, *theirs):
            each.close()
        if process:
            process.wait()


def _start(sockets: list[int]) -> subprocess.Popen[bytes] | None:
    # Isolated and without site-packages: it imports the standard library only, and starts fast.
    program = [sys.executable, "-I", "-S", str(Path(hasher.__file__)), *map(str, sockets)]
    try:
        return subprocess.Popen(
            program, pass_fds=sockets, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
