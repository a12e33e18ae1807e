"""The ledger of the page: its sums are those of `ckptdrill ledger`, and a gap is said to be one."""

import json
from typing import Any

import pytest

from ckptdrill import ledger
from ckptdrill.packet import StoredCell, build, cost, html, machine
from tests.packet.conftest import RUN, make_plan, make_verdict, stored
from tests.packet.test_html import Page


def cell(name: str = "a", target: int = 2, **numbers: Any) -> StoredCell:
    plan = make_plan(name, target=target)
    made = stored(plan, make_verdict(plan))
    made.verdict["numbers"] |= numbers
    return made


def test_a_row_says_what_ckptdrill_ledger_says(run_json: dict[str, Any]) -> None:
    view = build(run_json, [cell()])
    (row,) = cost.of_packet(view).rows
    (told,) = ledger.restores(json.loads(machine.render(view)))
    assert row.restore == f"{told.restore_s:.3g} s"
    assert row.occupied == f"{2 * told.restore_s / 3600:.3g} rank-h"
    assert (row.ranks, row.step, row.lost_steps, row.replay) == (2, "0.05 s", "–", "–")


def test_hours_are_of_gpus_where_there_are_some(run_json: dict[str, Any]) -> None:
    (row,) = cost.of_packet(build(run_json | {"node": {"gpus": 8}}, [cell()])).rows
    assert row.occupied.endswith(" GPU-h")


def test_the_slowest_restore_is_first_and_sets_the_scale(run_json: dict[str, Any]) -> None:
    slow = cell("slow", phases={"read": 3.0, "initialize": 1.0, "merged": []})
    found = cost.of_packet(build(run_json, [cell("quick"), slow]))
    assert [row.cell.id for row in found.rows] == ["slow", "quick"]
    assert [(bar.name, bar.x, bar.width) for bar in found.rows[0].bars] == [
        ("read", 0.0, 75.0),
        ("initialize", 75.0, 25.0),
    ]
    assert sum(bar.width for bar in found.rows[1].bars) == pytest.approx(100 * 1.74 / 4)
    assert found.phases == ("read", "initialize", "deserialize", "validate")


@pytest.mark.parametrize(
    ("numbers", "lost", "replay"),
    [
        ({"replayed_steps": 4}, "4", "0.2 s"),
        ({"storage": {"lost_steps": 3}}, "3", "0.15 s"),
        ({"tiers": {"after_loss": {"steps_lost": 2}}}, "2", "0.1 s"),
        ({"replayed_steps": 4, "step_s": None}, "4", "–"),
        ({"replayed_steps": None}, "–", "–"),
    ],
)
def test_replay_is_lost_steps_times_seconds_per_step(
    run_json: dict[str, Any], numbers: dict[str, Any], lost: str, replay: str
) -> None:
    (row,) = cost.of_packet(build(run_json, [cell(**numbers)])).rows
    assert (row.lost_steps, row.replay) == (lost, replay)


def test_tiers_stand_apart(run_json: dict[str, Any]) -> None:
    memory = {"step": 14, "steps_lost": 0, "recovery_s": 0.48}
    durable = {"step": 12, "steps_lost": 2, "recovery_s": 4.5}
    tiers = {"memory": memory, "after_loss": durable, "failed_at": 14}
    (told,) = cost.of_packet(build(run_json, [cell(tiers=tiers)])).recoveries
    assert told.memory == cost.Tier("step 14: 0 steps, 0 s of training", "0.48 s")
    assert told.durable == cost.Tier("step 12: 2 steps, 0.1 s of training", "4.5 s")
    lost = {"memory": memory, "after_loss": {"step": None, "steps_lost": None}}
    (told,) = cost.of_packet(build(run_json, [cell(tiers=lost)])).recoveries
    assert told.durable == cost.Tier("not recovered", "not recovered")


@pytest.mark.parametrize("phases", [None, {}, {"read": float("nan")}, "fast"])
def test_what_was_not_timed_has_no_row(run_json: dict[str, Any], phases: Any) -> None:
    assert cost.of_packet(build(run_json, [cell(phases=phases)])).rows == ()


def test_a_long_ledger_says_how_many_it_leaves_out(run_json: dict[str, Any]) -> None:
    found = cost.of_packet(build(run_json, [cell(f"c{n}") for n in range(cost.MOST_ROWS + 3)]))
    assert (len(found.rows), found.more) == (cost.MOST_ROWS, 3)


def test_the_page_says_which_phases_were_measured_together(run_json: dict[str, Any]) -> None:
    page = Page(html.render(build(RUN, [cell()])))
    assert "Measured together in one load call: reshard, read." in page.text
