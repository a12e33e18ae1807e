"""Facts on a disk that fills up and under a clock that is put back: none is merged or misdated."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptdrill.observer.facts import Recorder


@contextmanager
def files_end_at(size_bytes: int) -> Iterator[None]:
    """As on a disk that is full: a write is cut there, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_never_reaches_the_job() -> None:
    recorder = Recorder("/dev/full", 0)
    recorder.record("stepped")
    recorder.record_durably("exited")
    assert recorder.lost >= 2


@pytest.mark.parametrize("room_bytes", [0, 1, 40])
def test_what_found_no_room_is_counted_by_all_that_follows(tmp_path: Path, room_bytes: int) -> None:
    path = tmp_path / "rank0.jsonl"
    recorder = Recorder(str(path), 0)
    recorder.record("started")
    with files_end_at(path.stat().st_size + room_bytes):
        recorder.record("stepped", loss=1.0)
        recorder.record("stepped", loss=2.0)
    recorder.record("stopped")
    recorder.record("exited")
    lines = path.read_bytes().splitlines()
    whole = [json.loads(line) for line in (lines[0], *lines[-2:])]
    assert [(fact["fact"], fact.get("lost")) for fact in whole] == [
        ("started", None),
        ("stopped", 2),
        ("exited", 2),
    ]
    assert len(lines) == 3 + (room_bytes > 0)


def test_a_fact_that_does_not_reach_the_disk_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError

    recorder = Recorder(str(tmp_path / "rank0.jsonl"), 0)
    recorder.record_durably("started")
    assert recorder.lost == 0
    monkeypatch.setattr(os, "fsync", fail)
    recorder.record_durably("stopped")
    assert recorder.lost == 1


def test_times_go_on_when_the_clock_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank0.jsonl"
    recorder = Recorder(str(path), 0)
    recorder.record("load_begin")
    monkeypatch.setattr("time.time", lambda: 0.0)
    recorder.record("load_end")
    begin, end = (json.loads(line)["t"] for line in path.read_bytes().splitlines())
    assert 0 <= end - begin < 60
