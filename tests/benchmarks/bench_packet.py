"""What a packet costs: `python tests/benchmarks/bench_packet.py [cells] [RUN]`.

A thousand cells should be rendered in under five seconds, into a page of under 5 MB that opens in
under two; judging and rendering a small run should take less than one. Built first, and not timed:
a run folder with that many stored plans and verdicts, each with all rows and plots, one in ten
diverged. With RUN, a stored run is also judged again, in a process that has imported everything.

Processor time stands beside the time on the clock, since only the first is the same on a busy
machine. The page is opened where there is a Chromium, three times; the quickest counts.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckptdrill import packet, verbs
from ckptdrill.model import Check, Item, Reason, VerdictWord
from ckptdrill.packet import html
from ckptdrill.store import RunFolder, write_atomic, write_json
from tests.packet.chromium import EXECUTABLE, MISSING, Chromium, opened
from tests.packet.conftest import RUN, make_plan, make_verdict, stored

LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def build(run: RunFolder, cells: int) -> None:
    """A run of fifty routes and nine drills, as a run leaves it before its packet is derived."""
    write_json(run.run_json, RUN)
    write_atomic(run.matrix, "matrix: generated\n")
    for number in range(cells):
        plan = make_plan(f"cell-{number:05}", target=1 + number % 50, drill=f"drill-{number % 9}")
        verdict = make_verdict(plan)
        if number % 10 == 9:
            found = (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
            verdict = make_verdict(plan, *found, blame=Item.SCHEDULER, subject="group 0")
        verdict = replace(verdict, checks=tuple(_spread(verdict.checks)))
        cell = stored(plan, verdict)
        _write_facts(run, plan.restore.id, random.Random(number))
        write_json(run.cell(cell.id) / "plan.json", cell.plan)
        write_json(run.cell(cell.id) / "verdict.json", cell.verdict)


def _spread(checks: Sequence[Check]) -> Iterator[Check]:
    """The rows, each of which cites two facts of its own."""
    for number, check in enumerate(checks, 1):
        refs = tuple(f"{ref.rpartition(':')[0]}:{number}" for ref in check.facts)
        yield replace(check, facts=refs)


def _write_facts(run: RunFolder, launch_id: str, draw: random.Random) -> None:
    """Two ranks of twenty lines, in which times and digests are another one each."""
    for rank in (0, 1):
        lines = []
        for number in range(20):
            fact = {"fact": "state", "t": draw.random(), "rank": rank, "step": number}
            fact |= {"took_s": round(draw.random(), 6), "at": "forward"}
            fact["weights"] = [f"{draw.getrandbits(64):016x}" for _ in range(60)]
            lines.append(json.dumps(fact, separators=(",", ":")))
        write_atomic(run.launch(launch_id) / f"rank{rank}.jsonl", "\n".join(lines) + "\n")


def timed(what: str, function: Callable[[], Any]) -> Any:
    """Print what a call takes, and return its result."""
    processor_s, clock_s = time.process_time(), time.perf_counter()
    result = function()
    processor_s, clock_s = time.process_time() - processor_s, time.perf_counter() - clock_s
    print(f"{what}: {processor_s:.2f} s of processor time, {clock_s:.2f} s by the clock")
    return result


def open_page(page: Path) -> None:
    """Print how long a Chromium takes from the address to the end of the page's load event."""
    if EXECUTABLE is None:
        print(f"not opened: {MISSING}")
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Chromium(Path(profile))
        took_ms = []
        for _ in range(3):
            with opened(browser, page.as_uri()) as tab:
                took_ms.append(tab.run(LOADED))
        browser.close()
    print(f"opened by Chromium in {min(took_ms) / 1000:.2f} s")


def judge_again(run: Path, folder: Path) -> None:
    """Judge and render a copy of a stored run, twice: templates are compiled in the first."""
    copy = folder / "judged"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("work", "warm"))
    for what in ("judge and render", "the same once more"):
        timed(f"{what} {run.name}", lambda: _quietly(copy))


def _quietly(run: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        verbs.judge(run)


def main() -> None:
    """Judge where a run is named; then build, render, open."""
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory(prefix="bench-packet-") as scratch:
        if len(sys.argv) > 2:
            judge_again(Path(sys.argv[2]).resolve(), Path(scratch))
        run = RunFolder(Path(scratch, "run"))
        build(run, cells)
        print(f"{cells} cells")
        view = timed("read", lambda: packet.read(run))
        text = timed("page rendered", lambda: html.render(view))
        print(f"page of {len(text.encode()) / 1e6:.2f} MB")
        timed("read, rendered, every file written, hashed", lambda: packet.write(run))
        open_page(run.root / "index.html")


if __name__ == "__main__":
    main()
