"""The stall of storage, inside this process: what it reaches, what it leaves, when it is over."""

import builtins
import errno
import io
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptdrill.observer import storage
from ckptdrill.observer.facts import Recorder
from ckptdrill.observer.usage import usage

Start = Callable[..., Recorder]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start("enospc", seconds=5)` begins to stall what is written below `out`."""
    for holder, names in (
        (io, ["open"]),
        (builtins, ["open"]),
        (os, ["write", "pwrite", "fsync", "fdatasync"]),
        (torch, ["save"]),
    ):
        for name in names:  # set to what they are, so that they are put back
            monkeypatch.setattr(holder, name, getattr(holder, name))
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(storage, "_OUTPUT_BEFORE", {"out": 0, "err": 0})

    def begin(kind: str, rank: int | None = None, **parameters: Any) -> Recorder:
        recorder = Recorder(str(tmp_path / "rank0.jsonl"), 0)
        storage.install(recorder, launch(tmp_path, kind, rank, **parameters))
        return recorder

    return begin


def launch(folder: Path, kind: str, rank: int | None = None, **parameters: Any) -> dict[str, Any]:
    fault = {"kind": kind, "rank": rank, "parameters": parameters}
    return {"folder": str(folder), "out": str(folder / "out"), "first_step": 0, "fault": fault}


def fired(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    return [fact for line in lines if (fact := json.loads(line))["fact"] == "fault_fired"]


def test_a_full_disk_takes_a_part_and_then_nothing(start: Start, tmp_path: Path) -> None:
    start("enospc")
    path = tmp_path / "out" / "a.bin"
    with pytest.raises(OSError, match="No space left") as caught, path.open("wb") as stream:
        stream.write(bytes(10_000))
    assert caught.value.errno == errno.ENOSPC
    assert 0 < path.stat().st_size < 10_000
    fact = fired(tmp_path)[0]
    assert (fact["fault"], fact["operation"], fact["number"]) == ("enospc", "write", 1)
    assert (fact["path"], fact["size_bytes"]) == ("a.bin", 10_000)


def test_what_lies_elsewhere_or_is_read_is_left_alone(start: Start, tmp_path: Path) -> None:
    (tmp_path / "out" / "old").write_text("old")
    start("eio")
    (tmp_path / "beside").write_text("fine")
    assert (tmp_path / "out" / "old").read_text() == "old"
    assert fired(tmp_path) == []


@pytest.mark.parametrize(("mode", "data"), [("w", "text"), ("ab", b"bytes"), ("r+b", b"bytes")])
def test_files_behave_as_ever_once_it_is_over(
    start: Start, tmp_path: Path, mode: str, data: Any
) -> None:
    path = tmp_path / "out" / "a"
    path.write_bytes(b"0123456789")
    start("eio", seconds=0)
    with path.open(mode) as stream:
        stream.write(data)
        os.fsync(stream.fileno())
    expected = {"w": b"text", "ab": b"0123456789bytes", "r+b": b"bytes56789"}[mode]
    assert path.read_bytes() == expected


def test_torch_save_to_a_path_is_reached_and_leaves_no_whole_file(
    start: Start, tmp_path: Path
) -> None:
    start("eio")
    path = tmp_path / "out" / "a.pt"
    with pytest.raises(OSError, match="Input/output error"):
        torch.save({"a": torch.arange(5000.0)}, path)
    with pytest.raises(Exception, match=r".+"):
        torch.load(path, weights_only=True)


def test_a_save_through_a_stall_that_is_over_is_whole(start: Start, tmp_path: Path) -> None:
    start("slow", seconds=0.3)
    path = tmp_path / "out" / "a.pt"
    began = time.monotonic()
    torch.save({"a": torch.arange(5000.0)}, path)
    assert time.monotonic() - began >= 0.25
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.arange(5000.0))
    assert fired(tmp_path)


def test_flush_and_descriptors_are_reached(start: Start, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "out" / "a", os.O_WRONLY | os.O_CREAT)
    start("eio", writes=2)
    for call in (lambda: os.write(descriptor, b"a"), lambda: os.fsync(descriptor)):
        with pytest.raises(OSError, match="Input/output error"):
            call()
    assert os.write(descriptor, b"abc") == 3  # two writes: it is over
    os.close(descriptor)
    assert [fact["operation"] for fact in fired(tmp_path)] == ["write", "fsync"]


def test_it_begins_after_its_step(start: Start, tmp_path: Path) -> None:
    recorder = start("eio", step=8)
    (tmp_path / "out" / "step-4").write_text("4")
    recorder.step = 8
    with pytest.raises(OSError, match="Input/output error"):
        (tmp_path / "out" / "step-8").write_text("8")
    assert fired(tmp_path)[0]["step"] == 8


def test_another_rank_or_another_fault_changes_nothing(start: Start, tmp_path: Path) -> None:
    start("eio", rank=1)
    start("kill")
    (tmp_path / "out" / "a").write_text("a")
    assert fired(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "admits"),
    [
        ("OSError: [Errno 28] No space left on device", True),
        ("could not save step 8, will try again", True),
        ("WARNING: checkpoint at step 8 failed", True),
        ("saved step 8", False),
        ("step 8 loss 3.2", False),
    ],
)
def test_a_failure_is_told_by_a_line_that_says_so(tmp_path: Path, line: str, admits: bool) -> None:
    (tmp_path / "rank0.out").write_text(f"step 7\n{line}\n")
    (tmp_path / "rank0.err").write_text("")
    told = storage.told(launch(tmp_path, "enospc"), 0)
    assert (told is not None) == admits
    assert told in (None, {"file": "rank0.out", "text": line})


def test_what_was_said_before_the_stall_is_not_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "could not save step 4\n"
    (tmp_path / "rank0.out").write_text(said)
    (tmp_path / "rank0.err").write_text("")
    monkeypatch.setitem(storage._OUTPUT_BEFORE, "out", len(said))
    assert storage.told(launch(tmp_path, "enospc"), 0) is None


def test_what_is_in_flight_is_counted() -> None:
    running: Future[None] = Future()
    ended: Future[None] = Future()
    ended.set_result(None)
    response = SimpleNamespace(upload_completion=running)  # what newer releases of torch return
    found = usage([running, ended, response])
    assert found["saves_in_flight"] == 2
    assert found["threads"] >= 1
    assert 1 << 20 < found["rss_bytes"] < 1 << 40
