"""What the observer records of files while a job saves, and how it interrupts the job there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

JOB = """
    import os, sys
    from pathlib import Path
    import torch

    out = Path(sys.argv[1])
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step in (1, 2):
            torch.save(model.state_dict(), out / "weights.pt")
            torch.save(model.state_dict(), "elsewhere.pt")
            (out / "latest.tmp").write_text(f"step {step}")
            os.replace(out / "latest.tmp", out / "latest")
"""
EVENTS = [
    ("open", "weights.pt"),
    ("saved", None),
    ("open", "latest.tmp"),
    ("rename", "latest.tmp"),
    ("trains-on", None),
    ("ends", None),
]


@pytest.fixture
def recorded(observe: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Run the job so that its second save is recorded, perhaps under a fault."""

    def run(**keys: Any) -> Any:
        out = tmp_path / "out"
        out.mkdir()
        plan = {"root": str(out), "kept": str(tmp_path / "kept"), "step": 2}
        return observe(JOB, str(out), stop_step=2, file_events=plan, **keys)

    return run


def test_the_events_of_a_save_are_numbered(recorded: Callable[..., Any], tmp_path: Path) -> None:
    launch = recorded()
    launch.is_whole()
    facts = [fact for fact in launch.facts("file_event") if fact["n"] is not None]
    assert [(fact["op"], fact["path"]) for fact in facts] == EVENTS
    assert [fact["n"] for fact in facts] == list(range(len(EVENTS)))
    size = (tmp_path / "out" / "weights.pt").stat().st_size
    assert facts[1]["sizes"] == {"weights.pt": size}
    assert facts[3]["sizes"] == {"latest.tmp": len("step 2")}
    assert (tmp_path / "kept" / facts[3]["kept"]).read_text() == "step 1"


def test_an_ordinary_launch_records_no_file(observe: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert observe(JOB, str(tmp_path / "out"), stop_step=2).facts("file_event") == []


@pytest.mark.parametrize(
    ("kind", "sizes", "left"),
    [("kill", {}, "whole"), ("torn", {"weights.pt": 7}, "torn"), ("terminate", {}, "whole")],
)
def test_a_rank_is_gone_before_the_event(
    recorded: Callable[..., Any], tmp_path: Path, kind: str, sizes: dict[str, int], left: str
) -> None:
    fault = {"kind": kind, "rank": 0, "event": 1, "parameters": {"sizes": sizes}}
    launch = recorded(fault=fault)
    (fired,) = launch.facts("fault_fired")
    assert (fired["fault"], fired["event"], fired["op"]) == (kind, 1, "saved")
    assert launch.facts()[-1] == fired
    assert launch.ended["returncode"] != 0
    size = (tmp_path / "out" / "weights.pt").stat().st_size
    assert (size == 7) == (left == "torn")
    assert (tmp_path / "out" / "latest").read_text() == "step 1"


def test_a_fault_of_another_rank_does_not_fire(recorded: Callable[..., Any]) -> None:
    launch = recorded(fault={"kind": "kill", "rank": 1, "event": 1, "parameters": {}})
    launch.is_whole()
    assert launch.facts("fault_fired") == []
