"""Columns added up at once say what leaves say one by one, for every layout and every defect."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.columns import Part
from ckptdrill.fact_files import read_folder
from ckptdrill.judge import table
from ckptdrill.judge.logical import columnar
from ckptdrill.model import Fact, LaunchRecord, VerdictWord, to_json
from ckptdrill.observer.columns import Columns
from tests.judge.history import History, healthy

PARTS = {
    "state": ("weights", "buffers", "optimizer", "projections"),
    "inventory": ("leaves",),
    "restored": ("values",),
}


def in_columns(history: History, folder: Path) -> History:
    """The same evidence, written by the observer's columns and read back."""
    records = {
        name: replace(_stored(record, folder / name), launch_id=name, ended=record.ended)
        for name, record in history.evidence.records.items()
    }
    return history.given(records=records)


def _stored(record: LaunchRecord, folder: Path) -> LaunchRecord:
    folder.mkdir()
    for rank in range(record.world_size):
        lines = _lines([fact for fact in record.facts if fact.rank == rank])
        (folder / f"rank{rank}.jsonl").write_text("\n".join(lines))
    return read_folder(folder, record.launch_id, record.world_size)


def _lines(facts: list[Fact]) -> list[str]:
    lines: list[str] = []
    head: dict[str, Any] = {}

    def write(kind: str, **data: Any) -> None:
        lines.append(json.dumps({"fact": kind, **head, **data}, separators=(",", ":")))

    columns = Columns(write)
    for fact in facts:
        data = dict(fact.data)
        head = {"t": data.pop("t"), "rank": fact.rank, "step": fact.step}
        named = PARTS.get(fact.kind, ())
        write(fact.kind, **{k: columns.of(v) if k in named else v for k, v in data.items()})
    return lines


def same_verdict(history: History, folder: Path) -> VerdictWord:
    """The word of both verdicts, which are the same to the last character but for the numbers of
    lines: layouts stand between the facts.
    """
    plain, columns = history.verdict(), table.judge(in_columns(history, folder).evidence)
    texts = (json.dumps(to_json(each)) for each in (columns, plain))
    one, other = (re.sub(r"(rank\d+\.jsonl):\d+", r"\1", text) for text in texts)
    assert one == other
    return plain.word


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp2", "ddp1"),
        ("fsdp2", "fsdp4"),
        ("ddp2fsdp2", "fsdp2tp2"),  # replicas, and columns cut as well
        ("fsdp4", "fsdp7"),  # ranks that hold nothing of a parameter
    ],
)
def test_healthy_histories_are_judged_alike(source: str, target: str, tmp_path: Path) -> None:
    same_verdict(healthy(source, target), tmp_path)


def test_one_shard_that_differs_is_found(tmp_path: Path) -> None:
    broken = healthy("fsdp2", "fsdp4").differs("weights", "mix.weight", rank=3)
    assert same_verdict(broken, tmp_path) is VerdictWord.UNSUPPORTED


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_replicas_that_differ_are_found(part: str, tmp_path: Path) -> None:
    name = "mix.weight" if part == "weights" else "mix.weight.exp_avg"
    broken = healthy("ddp2fsdp2", "ddp2fsdp2").differs(part, name, rank=2)
    assert same_verdict(broken, tmp_path) is VerdictWord.UNSUPPORTED


@pytest.mark.parametrize("rank", [None, 1])
def test_entries_that_ranks_lost_are_found(rank: int | None, tmp_path: Path) -> None:
    broken = healthy("fsdp2").loses("optimizer", "mix.weight.exp_avg", rank=rank)
    assert same_verdict(broken, tmp_path) is VerdictWord.UNSUPPORTED


def test_plain_values_that_differ_on_one_rank_are_found(tmp_path: Path) -> None:
    broken = healthy("fsdp2").differs("optimizer", "mix.weight.step", rank=1)
    assert same_verdict(broken, tmp_path) is VerdictWord.UNSUPPORTED


def test_sums_wrap_word_by_word(tmp_path: Path) -> None:
    """Carries must not reach the other word of a tensor, nor the next tensor."""
    high, low = "f" * 16, "0" * 15 + "1"
    shards = [
        {"a": ["int8", [2], [n], [1], high + high], "b": ["int8", [2], [n], [1], low + low]}
        for n in range(2)
    ]
    history = healthy("fsdp2").edited(
        "state", lambda data: data.update(weights=shards[0]), rank=0
    ).edited("state", lambda data: data.update(weights=shards[1]), rank=1)  # fmt: skip
    record = in_columns(history, tmp_path).record("restore")
    facts = [f for f in record.of("state") if f.step == 0 and f.data["at"] == "forward"]
    assert all(isinstance(fact.data["weights"], Part) for fact in facts)
    added = columnar(facts, "weights")
    assert added is not None
    assert added["a"].digest == ("f" * 15 + "e") * 2
    assert added["b"].digest == ("0" * 15 + "2") * 2
