"""What earlier runs found, read from their folders: nothing is lost, nothing looks fresh that is
not.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckptdrill import changes, history
from ckptdrill.cli import app
from ckptdrill.model import Reason
from tests.stored_runs import FIRST_S, NIGHT_S, name_of, night, utc

HELD, DIVERGED, REFUSED, NOT_RUN = (
    Reason.HELD,
    Reason.DIVERGED,
    Reason.REFUSED,
    Reason.NOT_RUN,
)
LATER_S = FIRST_S + 30 * NIGHT_S


def told(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.output or repr(result.exception)


# --------------------------------------------------------------------------------------------------
# Reading


def test_runs_are_read_newest_first(tmp_path: Path) -> None:
    for number in (1, 3, 2):
        night(tmp_path, number, {"a": HELD})
    runs = history.read_all(tmp_path)
    assert [run.name for run in runs] == [name_of(FIRST_S + n * NIGHT_S) for n in (3, 2, 1)]
    assert runs[0].by_cell["a"].found == ("Pass", "held")
    assert runs[0].settings is not None
    assert runs[0].settings["default: torch"] == "2.13.0"


def test_a_run_that_began_on_a_clock_put_back_is_still_the_newest(tmp_path: Path) -> None:
    night(tmp_path, 5, {"a": HELD})
    later = night(tmp_path, 1, {"a": DIVERGED}, name=f"{name_of(FIRST_S + 5 * NIGHT_S)}-002")
    assert history.read_all(tmp_path)[0].name == later.name


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\1"])
def test_a_torn_run_is_named_and_not_left_out(tmp_path: Path, text: str) -> None:
    root = night(tmp_path, 1, {"a": HELD})
    (root / "run.json").write_text(text)
    (run,) = history.read_all(tmp_path)
    assert run.problem
    assert run.outcomes == ()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"word": "Pass", "reason": "good"}'])
def test_a_torn_verdict_is_no_pass(tmp_path: Path, text: str) -> None:
    root = night(tmp_path, 1, {"a": HELD, "b": HELD})
    (root / "cells/a/verdict.json").write_text(text)
    outcomes = history.read(root).by_cell
    assert not outcomes["a"].executed
    assert outcomes["b"].found == ("Pass", "held")


def test_what_is_no_run_is_passed_over(tmp_path: Path) -> None:
    root = night(tmp_path, 1, {"a": HELD})
    (tmp_path / "latest").symlink_to(root.name)
    (tmp_path / "notes").mkdir()
    assert len(history.read_all(tmp_path)) == 1


def test_a_run_whose_folder_is_gone_is_remembered(tmp_path: Path) -> None:
    root = night(tmp_path, 1, {"a": DIVERGED})
    before = history.read(root)
    history.retire(tmp_path, before)
    with (tmp_path / history.RETIRED_NAME).open("a") as stream:
        stream.write('{"name": "torn')
    (root / "run.json").unlink()
    root.rename(tmp_path / "elsewhere")
    (after,) = history.read_all(tmp_path)
    assert after.retired
    assert after.outcomes == before.outcomes
    assert after.settings == before.settings


# --------------------------------------------------------------------------------------------------
# The newest resume point


def test_the_newest_resume_point_is_that_of_any_run(tmp_path: Path) -> None:
    night(tmp_path, 1, {"a": HELD})
    night(tmp_path, 2, {"a": DIVERGED})
    point = history.newest_resume_point(history.read_all(tmp_path), LATER_S)
    assert point is not None
    assert (point.saved_s, point.step) == (FIRST_S + NIGHT_S + 1800, 8)


@pytest.mark.parametrize(
    "about",
    [
        {"source_unchanged": False},
        {"source_unchanged": None},
        {"status": "ran"},
        {"save": {"call": "async_save"}},
        {"save": {"ended_s": None}},
        {"save": {"step": None}},
        {"save": {"ended_s": LATER_S + 60}},
    ],
)
def test_a_resume_point_that_is_not_proven_is_none(tmp_path: Path, about: dict[str, Any]) -> None:
    night(tmp_path, 1, {"a": HELD}, **about)
    assert history.newest_resume_point(history.read_all(tmp_path), LATER_S) is None


def test_a_save_after_the_end_of_its_run_is_no_fresh_one(tmp_path: Path) -> None:
    """The clock was put back between the two: the date of the save cannot be believed."""
    night(tmp_path, 1, {"a": HELD}, save={"ended_s": FIRST_S + 9 * NIGHT_S})
    assert history.newest_resume_point(history.read_all(tmp_path), LATER_S) is None


def test_evidence_dated_in_the_future_is_not_fresh(tmp_path: Path) -> None:
    night(tmp_path, 9, {"a": HELD})
    runs, before_s = history.read_all(tmp_path), FIRST_S + NIGHT_S
    assert history.newest_resume_point(runs, before_s) is None
    assert runs[0].dated_s(before_s) is None
    assert runs[0].dated_s(LATER_S) == FIRST_S + 9 * NIGHT_S + 3600
    assert history.ahead_of(runs, before_s) == runs[0]
    assert history.ahead_of(runs, LATER_S) is None


# --------------------------------------------------------------------------------------------------
# The order of a short night


def test_the_most_valuable_cells_come_first(tmp_path: Path) -> None:
    night(tmp_path, 1, {"oldest": HELD})
    night(tmp_path, 2, {"middle": HELD, "failed": HELD})
    night(tmp_path, 3, {"youngest": HELD, "failed": REFUSED, "oldest": NOT_RUN, "never": NOT_RUN})
    cells = ["youngest", "middle", "oldest", "failed", "never"]
    order = history.by_value(cells, history.read_all(tmp_path), LATER_S)
    assert order == ("never", "failed", "oldest", "middle", "youngest")


def test_evidence_dated_in_the_future_counts_as_the_oldest(tmp_path: Path) -> None:
    night(tmp_path, 1, {"past": HELD})
    night(tmp_path, 9, {"future": HELD})
    runs = history.read_all(tmp_path)
    now_s = FIRST_S + 3 * NIGHT_S
    assert history.by_value(["past", "future"], runs, now_s) == ("future", "past")
    assert history.by_value(["past", "future"], runs, LATER_S) == ("past", "future")


# --------------------------------------------------------------------------------------------------
# Flaky, or changed


def test_a_verdict_that_changes_by_itself_is_flaky(tmp_path: Path) -> None:
    night(tmp_path, 1, {"a": HELD, "b": HELD})
    night(tmp_path, 2, {"a": NOT_RUN, "b": HELD})
    night(tmp_path, 3, {"a": DIVERGED, "b": HELD})
    runs = history.read_all(tmp_path)
    pair = history.flaky(runs, "a")
    assert pair is not None
    assert [run.name for run in pair] == [runs[0].name, runs[2].name]
    assert history.flaky(runs, "b") is None


def test_a_verdict_that_changes_with_a_version_is_not_flaky(tmp_path: Path) -> None:
    night(tmp_path, 1, {"a": HELD})
    night(tmp_path, 2, {"a": DIVERGED}, torch="2.14.0")
    assert history.flaky(history.read_all(tmp_path), "a") is None


def test_history_shows_runs_cells_and_what_changed(tmp_path: Path) -> None:
    night(tmp_path / "quick", 1, {"a": HELD, "b": HELD})
    night(tmp_path / "quick", 2, {"a": DIVERGED, "b": HELD}, torch="2.14.0")
    night(tmp_path / "quick", 3, {"a": HELD, "b": REFUSED}, torch="2.14.0", status="started")
    code, out = told("history", tmp_path)
    assert code == 0
    assert "quick: 3 runs" in out
    assert (
        "Unsupported diverged: weights, layers.0.weight  [default: torch 2.13.0 -> 2.14.0]" in out
    )
    assert "b  FLAKY" in out
    assert "not finished (started)" in out
    assert told("history", tmp_path / "quick")[1] == out
    assert told("history", tmp_path / "quick" / name_of(FIRST_S + NIGHT_S))[1] == out


def test_history_of_one_cell_and_few_runs(tmp_path: Path) -> None:
    for number in range(4):
        night(tmp_path, number, {"a": HELD, "b": HELD})
    code, out = told("history", tmp_path, "--cell", "b", "--limit", 2)
    assert code == 0
    assert "\nb\n" in out
    assert "\na\n" not in out
    assert "2 older ones" in out


def test_history_as_json(tmp_path: Path) -> None:
    night(tmp_path, 1, {"a": HELD})
    night(tmp_path, 2, {"a": DIVERGED})
    value = json.loads(told("history", tmp_path, "--json")[1])
    (found,) = value.values()
    assert [run["outcomes"][0]["reason"] for run in found["runs"]] == ["diverged", "held"]
    assert list(found["flaky"]) == ["a"]


@pytest.mark.parametrize("arguments", [[], ["--cell", "nothing"]])
def test_history_of_nothing_is_an_error(tmp_path: Path, arguments: list[str]) -> None:
    if arguments:
        night(tmp_path, 1, {"a": HELD})
    result = CliRunner().invoke(app, ["history", str(tmp_path), *arguments])
    assert "no " in str(result.exception)


# --------------------------------------------------------------------------------------------------
# Two runs side by side


def test_diff_says_what_changed_why_and_what_else_did(tmp_path: Path) -> None:
    a = night(tmp_path, 1, {"same": HELD, "worse": HELD, "gone": HELD})
    b = night(tmp_path, 2, {"same": HELD, "worse": DIVERGED, "new": HELD}, torch="2.14.0")
    code, out = told("diff", a, b)
    assert code == 1
    assert "worse: Pass held -> Unsupported diverged: weights, layers.0.weight" in out
    assert "    it diverged\n" in out
    assert "gone: Pass held -> not in this run" in out
    assert "new: not in this run -> Pass held" in out
    assert "changed: default: torch 2.13.0 -> 2.14.0" in out
    assert "verdicts that changed: 3; unchanged: 1" in out
    assert "nothing that a run records has changed" not in out


def test_diff_of_equal_runs(tmp_path: Path) -> None:
    a, b = (night(tmp_path, n, {"a": HELD}) for n in (1, 2))
    code, out = told("diff", a, b)
    assert code == 0
    assert "verdicts that changed: none; unchanged: 1" in out


def test_diff_says_when_nothing_explains_a_change(tmp_path: Path) -> None:
    a, b = night(tmp_path, 1, {"a": HELD}), night(tmp_path, 2, {"a": REFUSED})
    assert "nothing that a run records has changed" in told("diff", a, b)[1]


def test_a_cell_that_was_left_out_is_no_unexplained_change(tmp_path: Path) -> None:
    a, b = night(tmp_path, 1, {"a": HELD}), night(tmp_path, 2, {"a": NOT_RUN})
    assert not changes.between(history.read(a), history.read(b)).unexplained


def test_diff_as_json(tmp_path: Path) -> None:
    a, b = night(tmp_path, 1, {"a": HELD}), night(tmp_path, 2, {"a": REFUSED})
    code, out = told("diff", a, b, "--json")
    value = json.loads(out)
    assert code == 1
    assert value["cells"][0]["after"]["reason"] == "refused"


@pytest.mark.parametrize("other", ["folder", "tolerance", "torn"])
def test_a_run_is_compared_with_a_run_only(tmp_path: Path, other: str) -> None:
    a = night(tmp_path, 1, {"a": HELD})
    b = night(tmp_path, 2, {"a": HELD})
    arguments = {"folder": [a, tmp_path], "tolerance": [a, b, "--tolerance", 1], "torn": [a, b]}
    if other == "torn":
        (b / "run.json").write_text("{")
    result = CliRunner().invoke(app, ["diff", *map(str, arguments[other])])
    assert type(result.exception).__name__ == "UserError"


def test_times_are_read_as_they_are_written() -> None:
    assert history._unix_s(utc(FIRST_S)) == FIRST_S
