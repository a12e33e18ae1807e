"""A terminal gets a live table, a log gets one line per event and no control characters."""

import io
import os
import pty

import pytest

from ckptdrill.journal import StepState
from ckptdrill.progress import Event, ignore, shown

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


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        with shown(["source.a", "restore.a"], terminal) as report:
            for event in STORY:
                report(event)
        terminal.flush()
        said = os.read(reader, 100_000).decode()
    os.close(reader)
    assert "2 of 2 steps over, 0 running" in said
    assert "a runs cold from here: [bold] differs" in said
    assert "restore.a" in said


def test_nobody_need_look() -> None:
    for event in STORY:
        ignore(event)
