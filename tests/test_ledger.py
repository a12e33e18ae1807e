"""The bill of a failure: the worked example to the digit, impossible figures, measured inputs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ckptdrill import cli, ledger_text
from ckptdrill.errors import UserError
from ckptdrill.ledger import Failure, Tier, bills, entry, restores, slowest

WORKED = Failure(512, 123_576, 9.5, (123_456, 0.6), (None, None))
EXAMPLE = "--gpus 512 --committed-step 123456 --failed-step 123576 --step-s 9.5 --restore-h 0.6"


def cell(name: str, *, planned: bool = True, **phases_s: float) -> dict[str, Any]:
    return {
        "id": name,
        "planned_path": planned,
        "address": {"target": {"world_size": 4}},
        "restore": {
            "phases_s": phases_s,
            "merged": ["read", "deserialize", "reshard"],
            "step_s": 0.5,
        },
    }


def test_the_worked_example() -> None:
    (bill,) = bills(WORKED, None, optional=False)
    assert bill.lost_steps == 120
    assert bill.replay_s == 1140
    assert bill.replay_h == pytest.approx(0.3167, abs=5e-5)
    assert bill.restore_gpu_h == pytest.approx(307.2)
    assert bill.replay_gpu_h == pytest.approx(162.13, abs=5e-3)
    assert bill.gpu_h == pytest.approx(469.33, abs=5e-3)


def test_the_command_prints_the_worked_example() -> None:
    done = CliRunner().invoke(cli.app, ["ledger", *EXAMPLE.split()])
    assert done.exit_code == 0
    for figure in ("120", "1,140 s = 0.317 h", "307.2 GPU-h", "162.1 GPU-h", "469.3 GPU-h"):
        assert f" {figure} " in done.output


def test_json_has_every_figure_unrounded() -> None:
    done = CliRunner().invoke(cli.app, ["ledger", *EXAMPLE.split(), "--json"])
    (bill,) = json.loads(done.output)["bills"]
    assert bill["replay_gpu_h"] == 512 * 1140 / 3600
    assert bill["recovery_time_h"] == 0.6 + 1140 / 3600


def test_each_tier_has_its_own_recovery_point_and_time() -> None:
    both = dataclasses.replace(WORKED, memory=(123_570, 0.05))
    memory, durable = bills(both, None, optional=False)
    assert (memory.tier, memory.lost_steps, memory.replay_s) == ("memory", 6, 57.0)
    assert (durable.tier, durable.lost_steps) == ("durable", 120)
    assert memory.recovery_time_h < durable.recovery_time_h


def test_nothing_is_lost_when_the_failed_step_was_committed() -> None:
    bill = entry(Tier("durable", 10, 0.5), 8, 10, 1.0)
    assert (bill.lost_steps, bill.replay_gpu_h, bill.gpu_h) == (0, 0, 4.0)


@pytest.mark.parametrize(
    ("tier", "gpus", "failed", "step_s", "says"),
    [
        (Tier("durable", 11, 0.5), 8, 10, 1.0, "before the commit"),
        (Tier("durable", 9, 0.5), 0, 10, 1.0, "--gpus is 0"),
        (Tier("durable", 9, 0.5), 8, 10, -1.0, "--step-s is -1"),
        (Tier("durable", 9, float("nan")), 8, 10, 1.0, "restore hours"),
    ],
)
def test_impossible_figures_are_refused(
    tier: Tier, gpus: int, failed: int, step_s: float, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        entry(tier, gpus, failed, step_s)


@pytest.mark.parametrize("lost", ["gpus", "failed_step", "step_s"])
def test_a_figure_that_is_missing_is_named(lost: str) -> None:
    with pytest.raises(UserError, match=lost.replace("_", "-")):
        bills(dataclasses.replace(WORKED, **{lost: None}), None, optional=False)


def test_half_a_memory_tier_is_refused() -> None:
    with pytest.raises(UserError, match="needs both"):
        bills(dataclasses.replace(WORKED, memory=(5, None)), None, optional=False)


def test_what_a_run_measured_stands_in_for_what_is_not_given() -> None:
    found = restores({"cells": [cell("a", read=1.0, initialize=7.0, validate=5.0)]})
    given = Failure(None, 150, None, (100, None), (None, None))
    (bill,) = bills(given, slowest(found), optional=True)
    assert (bill.gpus, bill.replay_s, bill.restore_h) == (4, 25.0, 8.0 / 3600)


def test_without_a_failure_a_run_gives_no_bill() -> None:
    nothing = Failure(None, None, None, (None, None), (None, None))
    assert bills(nothing, None, optional=True) == []


def test_every_phase_is_there_measured_merged_or_said_not_to_be() -> None:
    (one,) = restores({"cells": [cell("a", read=1.0, initialize=7.0)]})
    assert [one.phase(n) for n in ("read", "deserialize", "validate")] == [
        "1 s",
        "in read",
        "not measured",
    ]


def test_both_tiers_that_a_drill_measured_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    made = cell("a", read=1.0)
    made["restore"]["tiers"] = {
        "memory": {"step": 12, "steps_lost": 1, "recovery_s": 0.5},
        "after_loss": {"step": None, "steps_lost": None, "recovery_s": None},
    }
    ledger_text.show_restores(Console(width=200), restores({"cells": [made]}))
    said = capsys.readouterr().out
    assert "a: memory tier intact: recovery point step 12 (1 steps lost), recovery time 0.5" in said
    assert "a: memory tier lost, durable storage: not recovered" in said


def test_the_planned_path_decides_what_is_slowest() -> None:
    cells = [cell("slow", planned=False, read=9.0), cell("fast", read=1.0), cell("none")]
    found = slowest(restores({"cells": cells}))
    assert found is not None
    assert found.cell == "fast"


@pytest.mark.parametrize(
    "packet", [{}, {"cells": [{}]}, {"cells": None}, {"cells": [cell("a")] * 2 + [1]}]
)
def test_a_packet_of_another_shape_is_a_user_error(packet: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="another shape"):
        restores(packet)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["ledger", str(tmp_path)])
    assert isinstance(done.exception, UserError)
