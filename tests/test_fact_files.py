"""Fact files are read as they were written, whatever was read before them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptdrill.fact_files import read_folder
from ckptdrill.model import LaunchRecord

KINDS = ("batch", "load_end", "state", "started", "crashed")  # the last two are each file's own
times = st.floats(0, 2e9, allow_nan=False) | st.integers(0, 10)
paths = st.sampled_from(("/a", "/b/step-8", 'C:\\a "b"/ü', "/a,b}", ""))
own = st.fixed_dictionaries({}, optional={"took_s": times, "path": paths})
more = st.dictionaries(st.sampled_from("xyz"), st.none() | times | st.text(max_size=3), max_size=2)
lines = st.tuples(st.sampled_from(KINDS), times, st.integers(0, 2), own, more)
files = st.lists(lines, min_size=1, max_size=6)
ends = st.sampled_from(("\n", "", "\n\n", '\n{"fact":"torn'))

Line = tuple[str, float, int, dict[str, Any], dict[str, Any]]


def written(folder: Path, content: list[Line], end: str = "\n") -> LaunchRecord:
    """Write a file as the observer does, and read it."""
    path = folder / "rank0.jsonl"
    heads = [{"fact": k, "t": t, "rank": 0, "step": s, **o, **m} for k, t, s, o, m in content]
    path.write_text("\n".join(json.dumps(h, separators=(",", ":")) for h in heads) + end)
    return read_folder(folder, "launch", 1)


def expected(content: list[Line]) -> list[tuple[Any, ...]]:
    return [
        (n, k, 0, s, t, o.get("took_s", 0.0), o.get("path"), m)
        for n, (k, t, s, o, m) in enumerate(content, 1)
    ]


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


@settings(max_examples=400)
@given(first=files, second=files, end=ends)
def test_what_was_read_before_changes_nothing(
    folder: Path, first: list[Line], second: list[Line], end: str
) -> None:
    again = [
        (k, t + 1, s, {**o, **{n: 0.5 for n in o if n == "took_s"}}, m) for k, t, s, o, m in first
    ]
    for content, last in ((first, "\n"), (again, "\n"), (first, end), (second, end)):
        assert told(written(folder, content, last)) == expected(content)


def test_a_file_that_differs_in_one_letter_is_not_taken_for_another(folder: Path) -> None:
    line: Line = ("batch", 1.0, 0, {}, {"rows": ["a" * 40]})
    other: Line = ("batch", 1.0, 0, {}, {"rows": ["a" * 39 + "b"]})
    found = [written(folder, [each]).facts[0].data["rows"][0][-1] for each in (line, other, line)]
    assert found == ["a", "b", "a"]


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
