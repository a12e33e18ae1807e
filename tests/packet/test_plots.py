"""Plots: drawn where numbers are, honest about what is no number, the geometry in its frame."""

from collections.abc import Callable
from typing import Any

import pytest

from ckptdrill.model import Item
from ckptdrill.packet import StoredCell, build, plots

Passing = Callable[[str], StoredCell]
Draw = Callable[[Item, dict[str, Any]], plots.Plots]


@pytest.fixture
def draw(run_json: dict[str, Any], passing: Passing) -> Draw:
    """The plots of a cell in which only one row carries numbers."""

    def draw_one(item: Item, numbers: dict[str, Any]) -> plots.Plots:
        cell = passing("a")
        for row in cell.verdict["checks"]:
            row["numbers"] = numbers if row["item"] == item else {}
        cell.verdict["numbers"] = {}
        return plots.of_cell(build(run_json, [cell]).cells[0])

    return draw_one


def coordinates(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]


def test_nothing_is_drawn_without_numbers(draw: Draw) -> None:
    assert not draw(Item.LOSS, {}).any


@pytest.mark.parametrize("numbers", [{"steps": "x"}, {"steps": [1]}, {"steps": [None]}])
def test_numbers_of_another_shape_draw_nothing(draw: Draw, numbers: dict[str, Any]) -> None:
    assert not draw(Item.LOSS, numbers).lines


def test_a_line_starts_left_rises_upwards_and_stays_in_its_frame(draw: Draw) -> None:
    numbers = {"steps": [1, 2, 3], "reference": [1.0, 2.0, 3.0], "restored": [1.0, 2.0, 3.0]}
    (plot,) = draw(Item.LOSS, numbers).lines
    points = coordinates(plot.lines[0].segments[0])
    assert points == sorted(points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert all(0 <= x <= plots.WIDTH and 0 <= y <= plots.HEIGHT for x, y in points)


def test_the_band_is_as_wide_as_the_tolerance(draw: Draw) -> None:
    numbers = {"steps": [1, 2], "reference": [10.0, 10.0], "restored": [10.0, 11.0], "band": 0.1}
    (plot,) = draw(Item.LOSS, numbers).lines
    upper_edge = coordinates(plot.band)[0][1]
    restored_end = coordinates(plot.lines[1].segments[0])[1][1]
    assert upper_edge == restored_end


def test_a_loss_that_is_not_a_number_leaves_a_gap_and_a_note(draw: Draw) -> None:
    numbers = {
        "steps": [1, 2, 3, 4, 5],
        "reference": [5.0, 4.0, 3.0, 2.0, 1.0],
        "restored": [5.0, 4.0, float("nan"), 2.0, 1.0],
    }
    (plot,) = draw(Item.LOSS, numbers).lines
    assert len(plot.lines[1].segments) == 2
    assert plot.notes == ("not finite at step 3",)


def test_deviation_is_drawn_against_its_band_and_says_where_it_is_from(draw: Draw) -> None:
    numbers = {"steps": [1, 2], "deviation": [0.0, -0.02], "band": 0.01, "band_from": "2 repeats"}
    (plot,) = draw(Item.LOSS, numbers).lines
    assert [line.style for line in plot.lines] == ["restored", "limit"]
    assert plot.notes == ("largest 0.02", "band 0.01, from 2 repeats")


def test_a_flat_line_is_drawn(draw: Draw) -> None:
    (plot,) = draw(Item.SCHEDULER, {"steps": [1, 2], "reference": [[0.0], [0.0]]}).lines
    assert len(plot.y_ticks) >= 2


def test_a_long_window_is_thinned_and_says_so(draw: Draw) -> None:
    steps = list(range(1000))
    (plot,) = draw(Item.SCHEDULER, {"steps": steps, "restored": [[1e-3 * n] for n in steps]}).lines
    assert len(coordinates(plot.lines[0].segments[0])) == 200
    assert plot.notes == ("every 5th step drawn",)


def test_every_group_is_a_line_and_those_left_out_are_counted(draw: Draw) -> None:
    rates = [[1e-3] * 6, [2e-3] * 6]
    (plot,) = draw(Item.SCHEDULER, {"steps": [1, 2], "reference": rates, "restored": rates}).lines
    assert [line.style for line in plot.lines] == ["reference"] * 4 + ["restored"] * 4
    assert plot.notes == ("4 of 6 groups drawn",)


def test_the_strip_says_what_happened_in_each_step(draw: Draw) -> None:
    strip = draw(
        Item.DATA,
        {
            "steps": [9, 10, 11, 12, 13],
            "missing": [0, 4, 0, 0, 0],
            "repeated": [0, 0, 4, 0, 0],
            "foreign": [0, 0, 0, 1, 0],
            "reordered": [False, True, False, False, True],
            "global_batch": [16] * 5,
        },
    ).strip
    assert strip is not None
    assert [step.state for step in strip.steps] == [
        "held",
        "missing",
        "repeated",
        "foreign",
        "reordered",
    ]
    assert strip.steps[1].meaning == "4 of 16 missing"
    assert strip.summary == "4 of 5 steps differ"


def test_the_first_update_is_that_of_all_parameters_then_of_the_furthest(draw: Draw) -> None:
    about = {"step": 9, "cosine": 0.99996, "norm_ratio": 1.0, "distance": 0.01, "band": 0.001}
    updates = draw(Item.UPDATES, about | {"furthest": {"b": [-0.2, 1.0], "c": [0.99]}}).updates
    assert updates is not None
    assert (updates.whole.cosine, updates.whole.norm_ratio) == ("0.99996", "1.00000")
    assert [(row.name, row.cosine, row.norm_ratio) for row in updates.rows] == [
        ("b", "-0.20000", "1.00000"),
    ]
    assert updates.notes == ("step 9", "relative distance 0.01, band 0.001")


def test_a_verdict_without_numbers_of_the_update_draws_none(draw: Draw) -> None:
    assert draw(Item.UPDATES, {"furthest": {"b": [1.0, 1.0]}}).updates is None


def test_phases_that_are_merged_in_words_are_not_said_to_be_missing(
    run_json: dict[str, Any], passing: Passing
) -> None:
    cell = passing("a")
    words = "read, deserialize and reshard happen in one load call"
    cell.verdict["numbers"] = {"phases": {"read": 1.0, "initialize": 3.0, "merged": [words]}}
    bar = plots.of_cell(build(run_json, [cell]).cells[0]).phases
    assert bar is not None
    assert bar.notes == (words, "not measured: validate")


def test_phases_fill_the_bar(run_json: dict[str, Any], passing: Passing) -> None:
    bar = plots.of_cell(build(run_json, [passing("a")]).cells[0]).phases
    assert bar is not None
    assert [part.name for part in bar.bars] == ["read", "deserialize", "initialize", "validate"]
    assert sum(part.width for part in bar.bars) == pytest.approx(100, abs=0.05)
    assert bar.notes == ("measured together: reshard, read", "wall time of the restore 2.1 s")
