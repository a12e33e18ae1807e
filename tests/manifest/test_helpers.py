"""The processes that hash: the same digest as everybody's, and no harm when one dies.

They are a shortcut only, so each failure of theirs has to end in the ordinary reading of the file.
"""

import faulthandler
import hashlib
import mmap
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import manifest
from ckptdrill.manifest import hasher, helpers
from ckptdrill.manifest.helpers import Helpers
from tests.manifest.folders import make

MANY = 1 << 40


@pytest.fixture
def two() -> Iterator[Helpers]:
    with helpers.started(2, MANY) as started:
        yield started


@pytest.mark.parametrize("size_bytes", [1 << 20, (8 << 20) - 1, 8 << 20, (16 << 20) + 4097])
def test_the_digest_of_everybody_else(two: Helpers, tmp_path: Path, size_bytes: int) -> None:
    data = os.urandom(1021) * (size_bytes // 1021 + 1)
    path = tmp_path / "file"
    path.write_bytes(data[:size_bytes])
    with path.open("rb") as stream:
        for _ in range(3):
            assert two.sha256(stream.fileno(), size_bytes) == (
                hashlib.sha256(data[:size_bytes]).hexdigest()
            )


def test_a_small_file_is_left_to_the_caller(two: Helpers) -> None:
    assert two.sha256(0, 1000) is None


def test_for_few_bytes_none_is_started() -> None:
    with helpers.started(2, 1000) as none:
        assert none.sha256(0, MANY) is None


def test_where_they_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers.sys, "executable", "/nowhere/python")
    with helpers.started(2, MANY) as none:
        assert none.sha256(0, MANY) is None


def test_a_file_shorter_than_it_was(two: Helpers, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (2 << 20))
    with path.open("rb") as stream:
        assert two.sha256(stream.fileno(), 3 << 20) is None
        assert two.sha256(stream.fileno(), 2 << 20) is not None


def test_what_cannot_be_mapped(two: Helpers) -> None:
    read, write = os.pipe()
    assert two.sha256(read, 2 << 20) is None
    os.close(read)
    os.close(write)


def _forked(work: Any) -> int:
    """The wait status of a child that did `work`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside the threads of xdist
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_file_that_is_cut_while_it_is_mapped_kills_its_reader(tmp_path: Path) -> None:
    """Why the mapping is done in a process of its own."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (4 << 20))
    real = mmap.mmap

    def cut(*args: Any, **kwargs: Any) -> mmap.mmap:
        window = real(*args, **kwargs)
        os.truncate(path, 0)
        return window

    def work() -> None:
        faulthandler.disable()  # it would write a report
        mmap.mmap = cut  # type: ignore[misc, assignment]
        with path.open("rb") as stream:
            hasher.sha256(stream.fileno(), 4 << 20)

    status = _forked(work)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGBUS


def _children(process: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        words = [word for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []
    found = [int(word) for word in words]
    return found + [below for child in found for below in _children(child)]


def _hashers() -> list[int]:
    """The running processes of `hasher` below this one, the one that forks first."""
    return [child for child in _children(os.getpid()) if _is_hasher(child)]


def _is_hasher(process: int) -> bool:
    try:
        return _runs(process) and b"hasher.py" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def test_when_every_helper_is_killed_the_files_are_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "step-1", {f"{i}.bin": bytes([i]) * (2 << 20) for i in range(4)})
    record = manifest.describe(folder)
    monkeypatch.setattr(helpers, "_MIN_TOTAL_BYTES", 0)
    real = Helpers.sha256
    asked: list[str | None] = []

    def kill_first(self: Helpers, descriptor: int, size_bytes: int) -> str | None:
        deadline = time.monotonic() + 20
        while len(_hashers()) < 2 and not asked and time.monotonic() < deadline:
            time.sleep(0.01)  # the one that forks, and the one that serves
        for child in _hashers()[1:]:
            os.kill(child, signal.SIGKILL)
        asked.append(real(self, descriptor, size_bytes))
        return asked[-1]

    monkeypatch.setattr(Helpers, "sha256", kill_first)
    assert manifest.verify(folder, record, workers=1) == ()
    assert asked == [None] * 4


def test_no_helper_stays_behind_when_all_is_done() -> None:
    with helpers.started(2, MANY):
        deadline = time.monotonic() + 5.0  # a child is ours before it has become the program
        while not _hashers() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _hashers()
    assert not _hashers()


def test_no_helper_outlives_one_who_is_killed() -> None:
    read, write = os.pipe()

    def work() -> None:
        with helpers.started(2, MANY):
            while len(_hashers()) < 3:
                time.sleep(0.01)
            os.write(write, ",".join(map(str, _hashers())).encode())
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.WIFSIGNALED(_forked(work))
    left = {int(word) for word in os.read(read, 1000).split(b",")}
    os.close(read)
    os.close(write)
    assert len(left) == 3
    deadline = time.monotonic() + 20
    while any(_runs(process) for process in left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [process for process in left if _runs(process)]


def _runs(process: int) -> bool:
    """Whether it is there and not a zombie that its new parent has yet to collect."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
