"""What a person sees while a run goes on: a live table on a terminal, plain lines anywhere else.

The run reports events and knows nothing of screens; a build log gets one line per event and nothing
that redraws.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from ckptdrill.journal import StepState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MARK = {
    StepState.STARTED: "▶",
    StepState.ENDED: "✓",
    StepState.FAILED: "✗",
    StepState.SKIPPED: "–",
    StepState.INTERRUPTED: "■",
    StepState.LEFT_OUT: "–",
}


@dataclass(frozen=True)
class Event:
    """A change of one step (`step_id` and `state`), or a remark about the run (`text` alone).

    `planned` are steps that have been added to the run since it began.
    """

    step_id: str | None = None
    state: StepState | None = None
    text: str = ""
    planned: tuple[str, ...] = ()


Report = Callable[[Event], None]


def ignore(_: Event) -> None:
    """Show nothing."""


@contextmanager
def shown(step_ids: Iterable[str], stream: TextIO = sys.stderr) -> Iterator[Report]:
    """Show the events of a run with these steps on `stream`, in the way that suits it."""
    board = _Board(tuple(step_ids))
    if not stream.isatty():
        yield lambda event: _print_line(board, event, stream)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)
    with Live(console=console, refresh_per_second=4, get_renderable=lambda: board.table(console)):
        yield lambda event: _print_remark(board, event, console)


@dataclass
class _Board:
    """What is known of each step at this moment; times are of the monotonic clock, in seconds.

    The live table is drawn by a thread of its own while events come in, hence the lock.
    """

    step_ids: tuple[str, ...]
    states: dict[str, StepState] = field(default_factory=dict)
    began_s: dict[str, float] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, event: Event) -> None:
        """Note an event; a step that nobody planned, such as the check of warm launches, counts."""
        named = (event.step_id,) if event.step_id is not None else ()
        with self.lock:
            self.step_ids = tuple(dict.fromkeys((*self.step_ids, *event.planned, *named)))
        if event.step_id is None or event.state is None:
            return
        now = time.monotonic()
        with self.lock:
            self.states[event.step_id] = event.state
            self.texts[event.step_id] = event.text
            if event.state is StepState.STARTED:
                self.began_s[event.step_id] = now
            elif event.step_id in self.began_s:
                self.took_s[event.step_id] = now - self.began_s[event.step_id]

    def over(self) -> int:
        """How many steps need nothing more."""
        return sum(state is not StepState.STARTED for state in self.states.values())

    def counts(self) -> str:
        """`3 of 9 steps over, 2 running`."""
        running = len(self.states) - self.over()
        return f"{self.over()} of {len(self.step_ids)} steps over, {running} running"

    def table(self, console: Console) -> Table:
        """The running steps, then those that ended last, as many as fit the screen."""
        from rich.table import Table

        with self.lock:
            table = Table(box=None, show_header=False, title=self.counts(), title_justify="left")
            running = [i for i, state in self.states.items() if state is StepState.STARTED]
            over = [i for i, state in self.states.items() if state is not StepState.STARTED]
            room = max(1, console.height - len(running) - 3)
            for step_id in (*over[-room:], *running):
                table.add_row(*_row(self, step_id))
        return table


def _row(board: _Board, step_id: str) -> tuple[str, str, str, str]:
    from rich.markup import escape

    began = board.began_s.get(step_id)
    so_far = time.monotonic() - began if began is not None else 0.0
    took = board.took_s.get(step_id, so_far)
    state = board.states[step_id]
    return (_MARK[state], escape(step_id), f"{took:6.1f} s", escape(board.texts[step_id]))


def _print_line(board: _Board, event: Event, stream: TextIO) -> None:
    board.take(event)
    stream.write(line_of(event, board.took_s, f"[{board.over()}/{len(board.step_ids)}]") + "\n")
    stream.flush()


def line_of(event: Event, took_s: Mapping[str, float], count: str) -> str:
    """One event in one line of a log."""
    if event.step_id is None or event.state is None:
        return event.text
    parts = [count, event.state.value, event.step_id]
    if event.state is not StepState.STARTED and event.step_id in took_s:
        parts.append(f"({took_s[event.step_id]:.1f} s)")
    if event.text:
        parts.append(f"- {event.text}")
    return " ".join(parts)


def _print_remark(board: _Board, event: Event, console: Console) -> None:
    board.take(event)
    if event.step_id is None:
        console.print(event.text, markup=False, highlight=False)
