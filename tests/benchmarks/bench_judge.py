"""How long judging takes: `python tests/benchmarks/bench_judge.py [cells] [ranks] [layers]`.

A thousand cells of 64 ranks should take under ten seconds, so that judging a stored run again is a
matter of course. As in a run, the cells share their source, repeat and control; every restore is
its own.
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckptdrill.judge import table
from ckptdrill.judge.evidence import Evidence
from ckptdrill.model import Fact, LaunchRecord, VerdictWord
from tests.judge.history import healthy
from tests.judge.training import Training

WITH_NAMES = ("weights", "optimizer", "projections")
TARGET_S = 10.0


def layered(record: LaunchRecord, layers: int) -> LaunchRecord:
    """The same launch of a model with that many copies of every parameter."""
    return dataclasses.replace(record, facts=tuple(_layered(f, layers) for f in record.facts))


def _layered(fact: Fact, layers: int) -> Fact:
    if fact.kind != "state":
        return fact
    data: dict[str, Any] = dict(fact.data)
    for part in WITH_NAMES:
        data[part] = {f"layers.{n}.{k}": v for n in range(layers) for k, v in data[part].items()}
    return dataclasses.replace(fact, data=data)


def fresh(evidence: Evidence) -> Evidence:
    """The evidence of another cell: the shared launches, and a restore with facts of its own."""
    name = evidence.plan.restore.id
    facts = tuple(dataclasses.replace(fact) for fact in evidence.records[name].facts)
    restore = dataclasses.replace(evidence.records[name], facts=facts)
    return dataclasses.replace(evidence, records={**evidence.records, name: restore})


def main() -> None:
    given = [int(text) for text in sys.argv[1:4]]
    cells, ranks, layers = (*given, *(1000, 64, 8)[len(given) :])
    evidence = healthy(
        f"fsdp{ranks}", f"ddp2fsdp{ranks // 2}", job=Training(global_batch=ranks)
    ).evidence
    records = {name: layered(record, layers) for name, record in evidence.records.items()}
    evidence = dataclasses.replace(evidence, records=records)
    words, took_s = set(), 0.0
    for _ in range(cells):
        cell = fresh(evidence)
        started = time.process_time()
        words.add(table.judge(cell).word)
        took_s += time.process_time() - started
    facts = sum(len(record.facts) for record in records.values())
    print(f"{cells} cells of {ranks} ranks, {3 * layers} parameters, {facts} facts each")
    print(f"{took_s:.2f} s of processor time (target {TARGET_S:g} s for 1000 cells)")
    print(f"{took_s / cells * 1e3:.2f} ms a cell")
    if words != {VerdictWord.PASS}:
        raise SystemExit(f"expected every cell to pass, found {sorted(words)}")


if __name__ == "__main__":
    main()
