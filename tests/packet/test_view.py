"""The view: order, counts, the one sentence, and what becomes of missing or damaged files."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from ckptdrill.errors import ExitCode
from ckptdrill.isolate import GuardLevel
from ckptdrill.model import Item, Reason, VerdictWord
from ckptdrill.packet import StoredCell, build

Passing = Callable[[str], StoredCell]


def changed(cell: StoredCell, **verdict: Any) -> StoredCell:
    return dataclasses.replace(cell, verdict=cell.verdict | verdict)


def test_cells_are_sorted_worst_first(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    view = build(run_json, all_three)
    assert [cell.id for cell in view.cells] == ["d-diverged", "c-refused", "b-unproven", "a-pass"]


def test_the_order_of_the_input_does_not_matter(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    assert build(run_json, all_three) == build(run_json, reversed(all_three))


def test_cells_against_expectation_come_before_expected_ones(
    run_json: dict[str, Any], passing: Passing
) -> None:
    refused = {"word": "Unsupported", "reason": "refused"}
    cells = [changed(passing("a"), expected=True, **refused)]
    cells.append(changed(passing("b"), expected=False, **refused))
    assert [cell.id for cell in build(run_json, cells).cells] == ["b", "a"]


def test_the_sentence_counts_every_kind_and_names_what_diverged(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    view = build(run_json, all_three)
    assert view.headline == (
        "1 of 4 cells Pass; 1 diverged: fsdp4 → fsdp2, dp-shrink (learning-rate schedule); "
        "1 more Unsupported; 1 Unproven."
    )
    assert view.counts == {
        VerdictWord.PASS: 1,
        VerdictWord.UNSUPPORTED: 2,
        VerdictWord.UNPROVEN: 1,
    }
    assert (view.diverged, view.unexpected) == (1, 3)


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (0, "This run has no cells: nothing was proven."),
        (1, "The one cell of this run is Pass."),
        (3, "All 3 cells Pass."),
    ],
)
def test_the_sentence_of_simple_runs(
    run_json: dict[str, Any], passing: Passing, count: int, sentence: str
) -> None:
    assert build(run_json, [passing(f"c{n}") for n in range(count)]).headline == sentence


@pytest.mark.parametrize(
    ("word", "expected", "code"),
    [
        ("Pass", True, ExitCode.AS_EXPECTED),
        ("Unsupported", True, ExitCode.AS_EXPECTED),
        ("Unsupported", False, ExitCode.UNSUPPORTED),
        ("Unproven", False, ExitCode.UNPROVEN),
        ("Pass", False, ExitCode.UNPROVEN),
    ],
)
def test_the_exit_code_follows_the_expectation(
    run_json: dict[str, Any], passing: Passing, word: str, expected: bool, code: ExitCode
) -> None:
    cell = changed(passing("a"), word=word, expected=expected)
    assert build(run_json, [cell]).exit_code is code


def test_a_changed_source_outranks_all_verdicts(run_json: dict[str, Any], passing: Passing) -> None:
    view = build(run_json | {"source_unchanged": False}, [passing("a")])
    assert view.exit_code is ExitCode.SOURCE_CHANGED


def test_a_cell_without_verdict_is_unproven_and_not_run(
    run_json: dict[str, Any], passing: Passing
) -> None:
    (cell,) = build(run_json, [dataclasses.replace(passing("a"), verdict=None)]).cells
    assert (cell.word, cell.reason) == (VerdictWord.UNPROVEN, Reason.NOT_RUN)
    assert not cell.expected
    assert cell.route == "fsdp4 → fsdp2"


@pytest.mark.parametrize(
    "damage",
    [
        {"word": "Fine"},
        {"reason": "because"},
        {"checks": [{"item": "weights"}]},
        {"checks": "none"},
        {"checks": [7]},
    ],
)
def test_a_verdict_of_another_shape_proves_nothing(
    run_json: dict[str, Any], passing: Passing, damage: dict[str, Any]
) -> None:
    (cell,) = build(run_json, [changed(passing("a"), **damage)]).cells
    assert (cell.word, cell.reason) == (VerdictWord.UNPROVEN, Reason.HARNESS_ERROR)
    assert not cell.expected


@pytest.mark.parametrize("verdict", [[], "Pass", 3, {}])
def test_a_verdict_that_is_no_verdict_proves_nothing(
    run_json: dict[str, Any], passing: Passing, verdict: object
) -> None:
    (cell,) = build(run_json, [dataclasses.replace(passing("a"), verdict=verdict)]).cells
    assert cell.reason is Reason.HARNESS_ERROR


@pytest.mark.parametrize("plan", [None, [], {}, {"cell": {"id": 1}}])
def test_without_a_plan_the_verdict_is_still_shown(
    run_json: dict[str, Any], passing: Passing, plan: object
) -> None:
    (cell,) = build(run_json, [dataclasses.replace(passing("a"), plan=plan)]).cells
    assert cell.word is VerdictWord.PASS
    assert (cell.source, cell.address) == ("unknown", "a")


def test_an_item_that_is_its_own_subject_is_blamed_once(
    run_json: dict[str, Any], passing: Passing
) -> None:
    cell = changed(passing("a"), blame_item="loss", blame_subject="loss")
    found = build(run_json, [cell]).cells[0]
    assert (found.blame_item, found.blame_subject) == (Item.LOSS, None)


def test_items_without_a_row_are_named(run_json: dict[str, Any], passing: Passing) -> None:
    whole = passing("a")
    rows = [row for row in whole.verdict["checks"] if row["item"] != Item.RNG]
    (cell,) = build(run_json, [changed(whole, checks=rows)]).cells
    assert cell.not_judged == (Item.RNG,)


def test_the_points_of_an_interrupted_save_are_listed(
    run_json: dict[str, Any], passing: Passing
) -> None:
    point = {
        "id": "rank1.event2.before",
        "event": 2,
        "where": "before open ck/__1_0.distcp",
        "class": "mixed",
        "steps_lost": None,
        "confirmed": True,
        "why": "weights: 2 of 4 differ",
        "files": {"old": 3, "new": 5},
    }
    whole = passing("a")
    row = {**whole.verdict["checks"][0], "item": "kept generations"}
    rows = [{**row, "numbers": {"points": [point, {"id": "of another shape"}]}}]
    (cell,) = build(run_json, [changed(whole, checks=rows)]).cells
    (view,) = cell.points
    assert (view.id, view.kept, view.confirmed) == ("rank1.event2.before", "mixed", True)
    assert view.where == "event 2: before open ck/__1_0.distcp"
    assert view.pieces == "3 old, 5 new"


def test_the_grid_holds_every_cell_once(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    grid = build(run_json, all_three).grid
    (row,) = grid.rows
    assert (row.source, row.target, grid.drills) == ("fsdp4", "fsdp2", ("dp-shrink",))
    assert [cell.id for cell in row.cells[0]] == ["d-diverged", "c-refused", "b-unproven", "a-pass"]


def test_what_run_json_lacks_is_said(passing: Passing) -> None:
    view = build({"status": "ran"}, [passing("a")])
    assert view.run.missing == (
        "versions",
        "environments",
        "node",
        "source_unchanged",
        "launcher",
        "guard",
    )


def test_launcher_and_guard_come_from_the_launches(
    run_json: dict[str, Any], passing: Passing
) -> None:
    begun = {"restore-a": {"launcher": "warm", "guard": "reflink"}, "source-fsdp4": []}
    about = {key: run_json[key] for key in run_json if key not in {"guard", "launcher"}}
    about["launchers"] = {"default": "warm: asked for"}
    view = build(about, [dataclasses.replace(passing("a"), launches=begun)])
    assert (view.run.launcher, view.run.guard, view.run.missing) == (
        "warm: asked for",
        "reflink",
        (),
    )
    found = {each.part: (each.launcher, each.guard) for each in view.cells[0].launches}
    assert (found["restore"], found["source"]) == (("warm", "reflink"), ("", ""))


@pytest.mark.parametrize(
    ("bound", "refused", "words"),
    [
        (2, None, "copy, read-only-bind"),
        (0, "unshare: Operation not permitted", "copy, no read-only-bind (unshare: Operation not"),
        (0, None, "copy"),
        (None, None, "copy"),
    ],
)
def test_the_guard_of_a_launch_says_why_a_level_is_missing(
    run_json: dict[str, Any], passing: Passing, bound: int | None, refused: str | None, words: str
) -> None:
    begun = {"guard": "copy", "bound_read_only": bound, "bind_refused": refused}
    cell = dataclasses.replace(passing("a"), launches={"restore-a": begun})
    restore = next(each for each in build(run_json, [cell]).cells[0].launches if each.guard)
    assert restore.guard.startswith(words)
    assert (GuardLevel.READ_ONLY_BIND in restore.guard) == (words != "copy")


@pytest.mark.parametrize(
    ("about", "took_s"),
    [
        ({}, 185.0),
        ({"took_s": 12.5}, 12.5),
        ({"took_s": 12.5, "ended_utc": "2026-03-02T03:00:00Z"}, 12.5),
        ({"ended_utc": "2026-03-02T03:00:00Z"}, None),
    ],
)
def test_no_clock_that_was_put_back_makes_a_duration(
    run_json: dict[str, Any], about: dict[str, Any], took_s: float | None
) -> None:
    assert build(run_json | about, []).run.wall_s == took_s


def source_record(**keys: Any) -> dict[str, Any]:
    files = {"a": [3, 1, 7, "ff"], "b": [4, 1, 8, "00"]}
    return {
        "path": "/ck",
        "of": "start_from",
        "before": files,
        "after": files,
        "changes": [],
        **keys,
    }


def test_each_source_is_shown_with_what_was_compared(run_json: dict[str, Any]) -> None:
    change = {"file": "a", "how": "content changed", "running": ["restore.x"]}
    stored = [
        source_record(),
        source_record(changes=[change]),
        source_record(after=None),
        {"path": "/of-another-form"},
    ]
    same, changed_one, unread = build(run_json, [], {"sources": stored}).run.sources
    assert (same.files, same.size_bytes, same.unchanged, same.changes) == (2, 7, True, ())
    assert changed_one.unchanged is False
    assert changed_one.changes == ("a: content changed, while restore.x ran",)
    assert unread.unchanged is None


def test_phases_that_were_not_measured_are_named(
    run_json: dict[str, Any], passing: Passing
) -> None:
    (cell,) = build(run_json, [passing("a")]).cells
    assert cell.phases is not None
    assert cell.phases.missing == ("reshard",)
    assert cell.phases.merged == ("reshard", "read")


@pytest.mark.parametrize(
    ("ref", "file"),
    [
        ("launches/x/rank0.jsonl:12", "launches/x/rank0.jsonl"),
        ("launches/x/exit.json", "launches/x/exit.json"),
        ("launches/../../etc/passwd:1", None),
        ("launches//etc/passwd", None),
        ("javascript:alert(1)", None),
        ("https://elsewhere/launches/x", None),
        ("/etc/passwd", None),
    ],
)
def test_only_paths_of_this_folder_are_linked(
    run_json: dict[str, Any], passing: Passing, ref: str, file: str | None
) -> None:
    (cell,) = build(run_json, [changed(passing("a"), facts=[ref])]).cells
    assert [(fact.ref, fact.file) for fact in cell.facts] == [(ref, file)]


def test_facts_are_labelled_by_the_part_of_their_launch(
    run_json: dict[str, Any], passing: Passing
) -> None:
    (cell,) = build(run_json, [passing("a")]).cells
    assert [fact.label for fact in cell.facts] == ["restore rank0:12"]


def test_the_routes_are_told_with_ranks_framework_precision_and_storage(
    run_json: dict[str, Any], passing: Callable[[str], StoredCell]
) -> None:
    view = build(run_json | {"stack": "dcp-fsdp2"}, [passing("a")])
    assert dict(view.run.drilled_with) == {
        "framework": "PyTorch DCP, FSDP2",
        "torch": "2.13.0",
        "precision": "float32",
        "storage": "xfs",
    }
    assert [row.ranks for row in view.grid.rows] == ["4 → 2"]
    assert dict(build({}, []).run.drilled_with)["storage"] == "not recorded"
