"""Fact files are read as they were written, whatever was read before them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptdrill.fact_files import read_folder
from ckptdrill.model import LaunchRecord

OWN = ("started", "crashed")
KINDS = ("batch", "load_end", "state", "stepped", *OWN)
TORN = '{"fact":"torn'
times = st.floats(0, 2e9, allow_nan=False) | st.integers(0, 10)
paths = st.sampled_from(("/a", "/b/step-8", 'C:\\a "b"/ü', "/a,b}", ""))
own = st.fixed_dictionaries({}, optional={"took_s": times, "path": paths})
more = st.dictionaries(st.sampled_from("xyz"), st.none() | times | st.text(max_size=3), max_size=2)
lines = st.tuples(st.sampled_from(KINDS), times, st.integers(0, 2), own, more)
torn = st.none()
files = st.lists(lines | torn, min_size=1, max_size=6)
ends = st.sampled_from(("\n", "", "\n\n", f"\n{TORN}"))

Line = tuple[str, float, int, dict[str, Any], dict[str, Any]]


def written(folder: Path, content: Sequence[Line | None], end: str = "\n") -> LaunchRecord:
    """Write a file as the observer does, torn lines for None, and read it."""
    (folder / "rank0.jsonl").write_text("\n".join(map(_text, content)) + end)
    return read_folder(folder, "launch", 1)


def _text(line: Line | None) -> str:
    if line is None:
        return TORN
    kind, t, step, own, more = line
    head = {"fact": kind, "t": t, "rank": 0, "step": step}
    return json.dumps({**head, **own, **more}, separators=(",", ":"))


def expected(content: Sequence[Line | None]) -> list[tuple[Any, ...]]:
    numbered = [(n, *line) for n, line in enumerate(content, 1) if line is not None]
    return [
        (n, kind, 0, step, t, own.get("took_s", 0.0), own.get("path"), more)
        for n, kind, t, step, own, more in numbered
    ]


def last_steps(content: Sequence[Line | None]) -> dict[int, int]:
    """By the facts of common kinds; a rank that has none has come to no step."""
    steps = [0 if line[0] in OWN else line[2] for line in content if line is not None]
    return {0: max(steps)} if steps else {}


def told(run: LaunchRecord) -> list[tuple[Any, ...]]:
    """Every fact with all that its line tells, in the order of the file."""
    found = []
    for fact in run.facts:
        more = {k: v for k, v in fact.data.items() if k not in ("took_s", "path")}
        own = (run.t(fact), run.took_s(fact), run.path(fact))
        found.append((fact.line, fact.kind, fact.rank, fact.step, *own, more))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("facts")


def later(line: Line | None) -> Line | None:
    """The same line of another launch."""
    if line is None:
        return None
    kind, t, step, own, more = line
    return kind, t + 1, step, {**own, **{name: 0.5 for name in own if name == "took_s"}}, more


def varied(line: Line | None) -> Line | None:
    """What a small fact of another launch may say instead."""
    if line is None or line[0] not in ("batch", "stepped"):
        return line
    kind, t, step, own, more = line
    return kind, t, step + 1, own, {**more, "pid": 7}


@settings(max_examples=600)
@given(first=files, second=files, end=ends)
def test_what_was_read_before_changes_nothing(
    folder: Path, first: list[Line | None], second: list[Line | None], end: str
) -> None:
    whole = [line for line in first if line is not None]
    again, other = [*map(later, first)], [*map(varied, first)]
    files = [(first, "\n"), (again, "\n"), (whole, "\n"), (other, "\n"), (again, "\n")]
    for content, last in (*files, (first, end), (second, end)):
        run = written(folder, content, last)
        assert told(run) == expected(content)
        assert run.last_steps == last_steps(content)


def test_a_file_that_differs_in_one_letter_is_not_taken_for_another(folder: Path) -> None:
    line: Line = ("batch", 1.0, 0, {}, {"rows": ["a" * 40]})
    other: Line = ("batch", 1.0, 0, {}, {"rows": ["a" * 39 + "b"]})
    found = [written(folder, [each]).facts[0].data["rows"][0][-1] for each in (line, other, line)]
    assert found == ["a", "b", "a"]


def test_small_facts_that_vary_are_each_launches_own_and_the_rest_is_shared(folder: Path) -> None:
    def seen(pid: int, rows: str = "a") -> list[Line]:
        stepped: Line = ("stepped", 2.0, 1, {}, {"counters": {"pid": pid}})
        return [("batch", 1.0, 0, {}, {"rows": [rows]}), stepped, ("state", 3.0, 1, {}, {"x": 1})]

    one, two, three = (written(folder, seen(pid)) for pid in (1, 2, 3))
    assert "stepped" in one.common.kinds  # nothing varied yet
    assert two.common is three.common
    assert two.common.kinds == one.common.kinds - {"stepped"}
    assert [run.of("stepped")[0].data["counters"]["pid"] for run in (one, two, three)] == [1, 2, 3]
    assert two.of("state") == three.of("state") == two.common.facts["state"]
    assert [run.last_steps for run in (two, three)] == [{0: 1}] * 2
    assert written(folder, seen(4, rows="b")).common is not two.common


def test_facts_of_another_rank_are_none_of_a_file(folder: Path) -> None:
    text = json.dumps({"fact": "batch", "t": 1.0, "rank": 1, "step": 0}, separators=(",", ":"))
    own = text.replace("batch", "started")
    (folder / "rank0.jsonl").write_text(f"{text}\n{own}\n")
    assert read_folder(folder, "launch", 1).facts == ()


def test_lines_of_a_process_are_its_own(folder: Path) -> None:
    files: list[list[Line]] = [
        [("started", 1.0, 0, {}, {"pid": pid}), ("batch", 2.0, 0, {}, {})] for pid in (1, 2)
    ]
    assert [written(folder, each).facts[0].data["pid"] for each in files] == [1, 2]


def test_a_line_of_its_own_that_says_more_than_the_last_is_read_whole(folder: Path) -> None:
    bare: list[Line] = [("crashed", 1.0, 0, {}, {}), ("batch", 2.0, 0, {}, {"n": 1})]
    more: list[Line] = [("crashed", 1.0, 0, {"took_s": 0.5}, {"x": 1}), bare[1]]
    for content in (bare, more, bare):
        assert told(written(folder, content)) == expected(content)
