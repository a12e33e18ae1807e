"""What the observer writes in columns is read back leaf by leaf as it was, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.columns import Part
from ckptdrill.fact_files import read_folder
from ckptdrill.model import Fact, LaunchRecord
from ckptdrill.observer.columns import Columns

DIGEST = "0123456789abcdef" * 2
ENTRY = ["float32", [4, 2], [2, 0], [2, 2], DIGEST]
LEAVES: dict[str, Any] = {
    "whole": ["bfloat16", [], [], [], DIGEST[::-1]],
    "shard": ENTRY,
    "strided": ["float32", [8], [[[0, 2], [4, 2]]], [4], DIGEST],
    "saved": {"entry": ENTRY, "projection": [1.5, -0.1, 1e-300]},
    "bare": {"entry": ENTRY},
    "step": 5.0,
    "seed": 2**127 + 1,
    "betas": [0.9, 0.95],
    "mixed": [1, 0.5],
    "name ü": "text",
    "not digested": "<not digested: meta>",
    "nothing": None,
}


def written(*states: dict[str, Any], kind: str = "inventory", part: str = "leaves") -> list[str]:
    """The lines of these states, in columns, in the order of one file."""
    lines: list[str] = []

    def write(fact: str, **data: Any) -> None:
        line = {"fact": fact, "t": 1.5, "rank": 0, "step": len(lines), **data}
        lines.append(json.dumps(line, separators=(",", ":")))

    columns = Columns(write)
    for leaves in states:
        write(kind, at="save", **{part: columns.of(leaves)})
    return lines


def record(folder: Path, lines: list[str]) -> LaunchRecord:
    (folder / "rank0.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return read_folder(folder, "launch", 1)


def read(folder: Path, lines: list[str]) -> tuple[Fact, ...]:
    return record(folder, lines).facts


def test_every_leaf_comes_back_as_it_was(tmp_path: Path) -> None:
    (fact,) = read(tmp_path, written(LEAVES))
    assert isinstance(fact.data["leaves"], Part)
    assert dict(fact.data["leaves"]) == LEAVES
    assert {k: type(v) for k, v in fact.data["leaves"].items()} == {
        k: type(v) for k, v in LEAVES.items()
    }
    assert (fact.kind, fact.rank, fact.data["at"]) == ("inventory", 0, "save")


def test_an_empty_part_is_no_columns(tmp_path: Path) -> None:
    assert read(tmp_path, written({}))[0].data["leaves"] == {}


def test_a_part_that_stays_is_told_once(tmp_path: Path) -> None:
    lines = written(LEAVES, LEAVES, {**LEAVES, "step": 6.0})
    assert [json.loads(line)["fact"] for line in lines].count("layout") == 1
    assert len(lines[2]) < len(lines[1]) / 2
    facts = read(tmp_path, lines)
    assert [fact.data["leaves"]["step"] for fact in facts] == [5.0, 5.0, 6.0]
    assert [fact.line for fact in facts] == [2, 3, 4]


def test_what_rests_on_a_lost_line_is_lost(tmp_path: Path) -> None:
    layout, first, again = written(LEAVES, LEAVES)
    assert read(tmp_path, [first, again]) == ()
    assert read(tmp_path, [layout[:-9], first, again]) == ()
    assert read(tmp_path, [layout, first[:-9], again]) == ()
    assert len(read(tmp_path, [layout, first, again])) == 2


@pytest.mark.parametrize(("old", "new"), [(DIGEST, DIGEST[1:]), (",[5.0,", ",["), ("=", "")])
def test_columns_that_do_not_fit_their_layout_are_unreadable(
    tmp_path: Path, old: str, new: str
) -> None:
    layout, fact = written(LEAVES)
    assert old in fact
    assert read(tmp_path, [layout, fact.replace(old, new, 1)]) == ()


def test_the_members_of_groups_are_names(tmp_path: Path) -> None:
    lines: list[str] = []

    def write(fact: str, **data: Any) -> None:
        lines.append(json.dumps({"fact": fact, "t": 0, "rank": 0, "step": 0, **data}))

    members = Columns(write).names(["a", "b"])
    write("state", groups=[[{"members": members, "hyper": {"lr": 0.1}}]])
    compact = [json.dumps(json.loads(line), separators=(",", ":")) for line in lines]
    (fact,) = read(tmp_path, compact)
    assert fact.data["groups"] == [[{"members": ["a", "b"], "hyper": {"lr": 0.1}}]]


def test_facts_leaf_by_leaf_are_read_as_ever(tmp_path: Path) -> None:
    line = {
        "fact": "inventory",
        "t": 1.0,
        "rank": 0,
        "step": 2,
        "leaves": LEAVES,
        "x": float("nan"),
    }
    (fact,) = read(tmp_path, [json.dumps(line)])
    assert fact.data["leaves"] == LEAVES
    assert fact.data["x"] != fact.data["x"]
    assert (fact.rank, fact.step) == (0, 2)


def one_file(folder: Path, *facts: dict[str, Any]) -> LaunchRecord:
    folder.mkdir()
    return record(folder, [json.dumps(fact, separators=(",", ":")) for fact in facts])


def load(path: str, took_s: float, **more: Any) -> dict[str, Any]:
    head = {"fact": "load_end", "t": took_s + 1, "rank": 0, "step": 3}
    return {**head, "took_s": took_s, "path": path, "call": "load", **more}


def test_what_files_have_in_common_is_shared_and_what_is_their_own_is_not(tmp_path: Path) -> None:
    one = one_file(tmp_path / "one", load("/a/step-8", 0.5))
    two = one_file(tmp_path / "two", load("/b/step-8", 0.25))
    assert one.common is two.common
    (fact,) = one.facts
    assert fact.data == {"call": "load"}
    assert [(run.t(fact), run.took_s(fact), run.path(fact)) for run in (one, two)] == [
        (1.5, 0.5, "/a/step-8"),
        (1.25, 0.25, "/b/step-8"),
    ]
    three, four = (
        one_file(tmp_path / name, load("/c", 0.5), {**load("/c", 1.0), "call": name})
        for name in ("three", "four")
    )
    assert three.common is not four.common
    assert [run.path(fact) for run in (three, four) for fact in run.facts] == ["/c"] * 4
    assert (three.facts[1].data["call"], four.facts[1].data["call"]) == ("three", "four")


def test_a_path_that_needs_escapes_is_read_as_it_was(tmp_path: Path) -> None:
    path = 'C:\\a "b"/ü'
    run = one_file(tmp_path / "one", load(path, 0.5))
    (fact,) = run.facts
    assert (run.path(fact), run.took_s(fact)) == (path, 0.5)


def test_a_common_line_that_rests_on_one_of_its_own_file_is_read_with_it(tmp_path: Path) -> None:
    layout, first, again = written(LEAVES, LEAVES)
    own = first.replace('"inventory"', '"not common"').replace('"leaves"', '"values"')
    restored = again.replace('"inventory"', '"restored"').replace('"leaves"', '"values"')
    told = first.replace('"inventory"', '"restored"').replace('"leaves"', '"values"')
    whole = read(tmp_path, [layout, told, restored])
    assert [dict(fact.data["values"]) for fact in whole] == [LEAVES, LEAVES]
    assert [fact.kind for fact in read(tmp_path, [layout, own, restored])] == ["not common"]


def test_a_torn_line_loses_itself_alone_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    lines = [json.dumps(load("/a", n / 4), separators=(",", ":")) for n in range(3)]
    run = record(tmp_path, [lines[0], lines[1][:-7], lines[2]])
    assert [(fact.line, run.took_s(fact)) for fact in run.facts] == [(1, 0.0), (3, 0.5)]
