"""How long judging takes: `python tests/benchmarks/bench_judge.py [cells] [ranks] [layers]`.

A thousand stored cells of 64 ranks should take under ten seconds on two idle cores, so that judging
a stored run again is a matter of course. Built first, and not timed: a run folder as the observer
and the schedule leave it, with one source, its repeat, a baseline, a control for each of three
targets, and for every cell a restore launch of its own with a fact file for every rank. One in ten
comes back with a tensor that differs on one rank. A rank records what the reference job records:
3 x `layers` parameters with their moments, seven sampled states, what was loaded and what was
saved, and what its process did beside that.

Twice: first, as in the run of a job that repeats itself bit by bit, restores of one target differ
in times, paths and lines of their own alone; then every rank of every restore also has a generator
that nobody seeded, so that no file says what another says.

Timed: `judge_run`, which reads every fact file, judges, and writes every verdict. Beside it stands
the floor, measured in the same run: as many processes that only read and parse the same files.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckptdrill.judging import judge_run
from ckptdrill.model import Fact, LaunchRecord, Plan, to_json
from ckptdrill.observer.columns import Columns
from ckptdrill.store import RunFolder, write_json
from tests.judge.history import ENDED_WELL, History, healthy
from tests.judge.training import PARAMETERS, Training, hex_digest
from tests.test_judging import matrix

TARGET_S = 10.0
WITH_NAMES = ("weights", "optimizer", "projections")
WITH_COLUMNS = {
    "state": (*WITH_NAMES, "buffers"),
    "inventory": ("leaves",),
    "restored": ("values",),
}
RSS_BYTES = 400_000_000
TIME = 1_700_000_000  # of the templates; every restore gets its own


# ------------------------------------------------------------------ what a rank records


def layered(fact: Fact, layers: int, state: dict[str, Any]) -> Iterator[Fact]:
    """The same fact of a model with that many copies of every parameter.

    `state` is the state that was sampled last: a save and a load have its tensors as leaves.
    """
    data: dict[str, Any] = dict(fact.data)
    if fact.kind == "state":
        for part in WITH_NAMES:
            data[part] = {
                f"layers.{n}.{k}": v for n in range(layers) for k, v in data[part].items()
            }
        data["projections"] = {k: [float(x) for x in 4 * v] for k, v in data["projections"].items()}
        if data["at"] == "save":
            data["projections"] = {}
        state.update(data)
        state["projection"] = next(iter(data["projections"].values()), state.get("projection"))
    if fact.kind == "inventory":
        own = {k: v for k, v in data["leaves"].items() if not isinstance(v, dict)}
        data["leaves"] = {**own, **_saved(state)}
    yield msgspec.structs.replace(fact, data=data)
    for kind, more in beside(fact):
        yield msgspec.structs.replace(fact, kind=kind, data={"t": fact.data["t"], **more})
    if fact.kind == "inventory" and data["at"] == "load":
        for part in ("weights", "optimizer"):
            put = {"part": part, "values": state[part], "missing": [], "unexpected": [], "keys": 3}
            told = {"t": fact.data["t"], **put}
            yield msgspec.structs.replace(fact, kind="restored", data=told)


def beside(fact: Fact) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines that no two launches have in common: of the process, and of the script's variables."""
    if fact.kind == "started":
        digests = dict.fromkeys(("python", "torch", "numpy"), "0123456789abcdef" * 2)
        yield from [("rng_set", {"by": "torch.manual_seed", "kinds": digests})] * 8
        yield "code", {"files": {"__main__": "0123456789abcdef" * 4}}
        yield "imported", {"packages": {f"package_{n}": "1.0.0" for n in range(7)}}
    if fact.kind == "state" and fact.data["at"] == "forward":
        yield "variables", {"values": {f"main.run.variable_{n}": fact.step for n in range(22)}}
    if fact.kind == "stepped":
        yield "usage", {"rss_bytes": RSS_BYTES, "threads": 1, "saves_in_flight": 0}


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    projection = state["projection"]
    tensors = {f"model.{k}": v for k, v in state["weights"].items()}
    tensors |= {f"optimizer.{k}": v for k, v in state["optimizer"].items() if isinstance(v, list)}
    return {k: {"entry": v, "projection": projection} for k, v in tensors.items()}


def lines(facts: Iterable[Fact]) -> bytes:
    """The fact file of one rank, written as the observer writes it."""
    found: list[str] = []
    head: dict[str, Any] = {}

    def write(kind: str, **data: Any) -> None:
        found.append(json.dumps({"fact": kind, **head, **data}, separators=(",", ":")))

    columns = Columns(write)
    for fact in facts:
        told = dict(fact.data)
        head = {"t": TIME + told.pop("t"), "rank": fact.rank, "step": fact.step}
        own = {name: told[name] for name in ("took_s", "path") if name in told}
        data: dict[str, Any] = {**own, **told}
        for part in WITH_COLUMNS.get(fact.kind, ()):
            data[part] = columns.of(data[part])
        if fact.kind == "state":
            data["groups"] = [
                [{**g, "members": columns.names(g["members"])} for g in gs] for gs in data["groups"]
            ]
        write(fact.kind, **data)
    return "\n".join(found).encode() + b"\n"


def files(record: LaunchRecord, layers: int) -> list[bytes]:
    """The fact file of every rank of a launch."""
    found = []
    for rank in range(record.world_size):
        mine = [fact for fact in record.facts if fact.rank == rank]
        first = next(fact for fact in mine if fact.kind == "state")
        state: dict[str, Any] = {}
        list(layered(first, layers, state))  # what a load gives back is there before any sample
        found.append(lines(each for fact in mine for each in layered(fact, layers, state)))
    return found


# ------------------------------------------------------------------ the run folder


def build(
    run: RunFolder, cells: int, ranks: int, layers: int, *, alike: bool = True
) -> tuple[Plan, ...]:
    """Write a run of that many cells, its targets in turn, every tenth restore with a defect."""
    # Every rank holds a part of every parameter, in each of the layouts.
    PARAMETERS.update(dict.fromkeys(PARAMETERS, (2 * ranks, 2)))
    targets = (f"fsdp{ranks}", f"ddp2fsdp{ranks // 2}", f"fsdp{ranks // 2}tp2")
    job = Training(global_batch=ranks)
    histories = [healthy(targets[0], target, job=job) for target in targets]
    restores = []
    for history in histories:
        for name, record in history.evidence.records.items():
            if name != history.id("restore") and not run.launch(name).exists():
                write_launch(run, name, files(record, layers))
        broken = history.differs("weights", "mix.weight", rank=1)
        restores.append([files(h.record("restore"), layers) for h in (history, broken)])
    plans = []
    for number in range(cells):
        target = number % len(targets)
        plan = _plan(histories[target], f"{targets[target]}.{number:04d}")
        template = restores[target][number % 10 == 9]
        own = (
            (str(TIME // 10_000), str(TIME // 10_000 + 1 + number)),
            ('"took_s":0.01', f'"took_s":0.01{number:04d}'),
            (f"{RSS_BYTES}", f"{RSS_BYTES + number}"),
            (histories[target].id("restore"), plan.restore.id),
        )
        contents = [_replaced(each, own) for each in template]
        if not alike:
            contents = [_unseeded(each, number, rank) for rank, each in enumerate(contents)]
        write_launch(run, plan.restore.id, contents)
        write_json(run.cell(plan.cell.id) / "plan.json", to_json(plan))
        plans.append(plan)
    return tuple(plans)


def _replaced(content: bytes, pairs: Iterable[tuple[str, str]]) -> bytes:
    for old, new in pairs:
        content = content.replace(old.encode(), new.encode())
    return content


def _unseeded(content: bytes, number: int, rank: int) -> bytes:
    digest = hex_digest("python", rank)
    return _replaced(content, [(digest, f"{number:032x}")])


def write_launch(run: RunFolder, name: str, contents: list[bytes]) -> None:
    """Fact files and exit record of one launch."""
    folder = run.launch(name)
    folder.mkdir(parents=True)
    for rank, content in enumerate(contents):
        (folder / f"rank{rank}.jsonl").write_bytes(content)
    (folder / "exit.json").write_text(json.dumps(ENDED_WELL))


def _plan(history: History, name: str) -> Plan:
    plan = history.evidence.plan
    return dataclasses.replace(
        plan,
        cell=dataclasses.replace(plan.cell, id=name),
        restore=dataclasses.replace(plan.restore, id=f"restore.{name}"),
    )


# ------------------------------------------------------------------ measuring


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds on the clock, seconds of processor time with children, and the result."""
    before, began = _processor_s(), time.perf_counter()
    result = function()
    return time.perf_counter() - began, _processor_s() - before, result


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def parse(paths: list[Path]) -> int:
    """Read and parse fact files, and nothing else; their size in bytes."""
    size = 0
    for path in paths:
        content = path.read_bytes()
        size += len(content)
        for line in content.splitlines():
            msgspec.json.decode(line)
    return size


def parse_all(run: RunFolder) -> int:
    """`parse` of all fact files by one process for each core."""
    paths = sorted(run.root.glob("launches/*/*.jsonl"))
    workers = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return sum(
            pool.imap_unordered(parse, [paths[n : n + 512] for n in range(0, len(paths), 512)])
        )


def measure(cells: int, ranks: int, layers: int, *, alike: bool) -> None:
    """Build a run, judge it, and print what it took."""
    with tempfile.TemporaryDirectory(prefix="bench-judge-") as scratch:
        run = RunFolder(Path(scratch))
        plans = build(run, cells, ranks, layers, alike=alike)
        floor_s, floor_processor_s, size = timed(lambda: parse_all(run))
        took_s, processor_s, verdicts = timed(lambda: judge_run(run, matrix(), plans))
    print("restores of one target record the same" if alike else "no two restores record the same")
    print(f"  {cells} cells, {ranks} ranks, {3 * layers} parameters, {size / 1e9:.2f} GB of facts")
    print(f"  read and parsed, no more: {floor_s:.2f} s, processor time {floor_processor_s:.2f} s")
    print(f"  judged: {took_s:.2f} s, processor time {processor_s:.2f} s")
    print(f"  {took_s / cells * 1000:.2f} s for 1000 cells (target {TARGET_S:g} s)")
    words = Counter(verdict.word.value for verdict in verdicts)
    print("  " + ", ".join(f"{n} {word}" for word, n in sorted(words.items())), flush=True)
    if words != {"Pass": cells - cells // 10, "Unsupported": cells // 10}:
        raise SystemExit("expected one Unsupported in ten, all others Pass")


def main() -> None:
    given = [int(text) for text in sys.argv[1:4]]
    cells, ranks, layers = (*given, *(1000, 64, 8)[len(given) :])
    for alike in (True, False):
        measure(cells, ranks, layers, alike=alike)


if __name__ == "__main__":
    main()
