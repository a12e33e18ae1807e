"""A terminal gets a live table, a log gets one line per event and no control characters."""

import io
import os
import pty
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from ckptdrill.journal import StepState
from ckptdrill.progress import Event, _Board, ignore, shown

STORY = (
    Event("source.a", StepState.STARTED, "2 ranks"),
    Event(text="a runs cold from here: [bold] differs"),
    Event("source.a", StepState.ENDED),
    Event("restore.a", StepState.SKIPPED, "source.a: ended with exit code 1"),
)


def test_a_log_gets_one_line_per_event() -> None:
    log = io.StringIO()
    with shown(["source.a", "restore.a"], log) as report:
        for event in STORY:
            report(event)
    lines = log.getvalue().splitlines()
    assert lines[0] == "[0/2] started source.a - 2 ranks"
    assert lines[1] == "a runs cold from here: [bold] differs"
    assert lines[2].startswith("[1/2] ended source.a (0.")
    assert lines[3] == "[2/2] skipped restore.a - source.a: ended with exit code 1"
    assert "\x1b" not in log.getvalue()


def test_no_more_steps_are_over_than_there_are() -> None:
    log = io.StringIO()
    with shown(["source.a"], log) as report:
        for state in (StepState.STARTED, StepState.ENDED):
            report(Event("source.a", state))
            report(Event("warm-check.source.a", state))
    counts = [line.split(" ", 1)[0] for line in log.getvalue().splitlines()]
    assert counts == ["[0/1]", "[0/2]", "[1/2]", "[2/2]"]


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    with ThreadPoolExecutor(1) as threads:
        saying = threads.submit(_all_of, reader)
        with os.fdopen(writer, "w") as terminal, shown(["source.a", "restore.a"], terminal) as tell:
            for event in STORY:
                tell(event)
        said = saying.result()
    os.close(reader)
    assert "2 of 2 steps over, 0 running" in said
    assert "a runs cold from here: [bold] differs" in said
    assert "restore.a" in said


def _all_of(reader: int) -> str:
    """What a terminal is told until its writer closes. One read gives only what has arrived, and a
    writer waits once 4 KiB are unread.
    """
    parts = []
    while True:
        try:
            parts.append(os.read(reader, 65536))
        except OSError:  # EIO: the other side is closed
            return b"".join(parts).decode()


@pytest.fixture
def _restless_threads() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.usefixtures("_restless_threads")
def test_the_table_is_drawn_while_events_come_in() -> None:
    steps = [f"step{number}" for number in range(4000)]
    board, console, over = _Board(tuple(steps)), Console(file=io.StringIO()), threading.Event()

    def drawn_till_the_end() -> object:
        while not over.is_set():
            board.table(console)
        return board.table(console).title

    with ThreadPoolExecutor(1) as threads:
        drawing = threads.submit(drawn_till_the_end)
        for state in (StepState.STARTED, StepState.ENDED):
            for step in steps:
                board.take(Event(step, state))
        over.set()
        assert drawing.result() == "4000 of 4000 steps over, 0 running"


def test_nobody_need_look() -> None:
    for event in STORY:
        ignore(event)
