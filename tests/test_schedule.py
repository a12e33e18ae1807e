"""The order of a run: nothing before what it needs, no device twice, the machine kept full."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptdrill.errors import UserError
from ckptdrill.model import Checkpoint, Damage, DamageKind, Launch, Role, Step, Topology
from ckptdrill.schedule import (
    Assignment,
    Capacity,
    Graph,
    cost_s,
    forecast,
    next_steps,
    ranks_of,
    skip_reasons,
)


def launch(name: str, ranks: int = 2, restores: str | None = None) -> Launch:
    checkpoint = Checkpoint(restores, 4) if restores else None
    role = Role.RESTORE if restores else Role.SOURCE
    return Launch(name, role, Topology(name, dp_shard=ranks), "default", 8, checkpoint)


def graph(*steps: Step) -> Graph:
    return Graph.of({step.id: step for step in steps})


def started(assignments: tuple[Assignment, ...]) -> list[str]:
    return [assignment.step_id for assignment in assignments]


def test_a_step_waits_for_what_it_restores() -> None:
    plan = graph(launch("source"), launch("restore", restores="source"))
    capacity = Capacity(8)
    assert started(next_steps(plan, capacity, ended=(), running={})) == ["source"]
    assert started(next_steps(plan, capacity, ended=(), running={"source": ()})) == []
    assert started(next_steps(plan, capacity, ended=("source",), running={})) == ["restore"]


def test_a_damaged_restore_waits_for_the_damage() -> None:
    damage = Damage("damage", DamageKind.BIT_FLIP, Checkpoint("source", 4))
    damaged = Checkpoint("source", 4, "damage")
    restore = Launch("restore", Role.RESTORE, Topology("a"), "default", 8, damaged)
    plan = graph(launch("source"), damage, restore)
    assert started(next_steps(plan, Capacity(4), ended=("source",), running={})) == ["damage"]
    ended = ("source", "damage")
    assert started(next_steps(plan, Capacity(4), ended=ended, running={})) == ["restore"]


def test_the_longest_chain_starts_first() -> None:
    plan = graph(
        launch("short"),
        launch("long"),
        launch("first", restores="long"),
        launch("second", restores="first"),
    )
    assert started(next_steps(plan, Capacity(2), ended=(), running={})) == ["long"]


def test_a_smaller_step_fills_what_a_larger_one_leaves() -> None:
    plan = graph(launch("a", 3), launch("b", 3), launch("c", 1))
    assert started(next_steps(plan, Capacity(4), ended=(), running={})) == ["a", "c"]


def test_a_step_larger_than_the_machine_runs_alone() -> None:
    plan = graph(launch("small", 2), launch("huge", 8))
    capacity = Capacity(4)
    assert started(next_steps(plan, capacity, ended=(), running={})) == ["huge"]
    assert started(next_steps(plan, capacity, ended=(), running={"small": ()})) == []
    assert started(next_steps(plan, capacity, ended=("huge",), running={})) == ["small"]


def test_a_damage_needs_no_room() -> None:
    damage = Damage("damage", DamageKind.DELETE, Checkpoint("source", 4))
    plan = graph(launch("source"), launch("other", 4), damage)
    assert started(next_steps(plan, Capacity(4), ended=("source",), running={"other": ()})) == [
        "damage"
    ]


def test_a_held_step_does_not_start() -> None:
    plan = graph(launch("a"), launch("b"))
    assert started(next_steps(plan, Capacity(4), ended=(), running={}, held=["a"])) == ["b"]


def test_devices_are_handed_out_once() -> None:
    plan = graph(launch("a", 2), launch("b", 1), launch("c", 1))
    capacity = Capacity(4, ("0", "1", "2", "3"))
    first = next_steps(plan, capacity, ended=(), running={"a": ("1", "2")})
    assert {a.step_id: a.devices for a in first} == {"b": ("0",), "c": ("3",)}


def test_a_loss_is_passed_on_with_its_first_cause() -> None:
    plan = graph(
        launch("source"),
        launch("first", restores="source"),
        launch("second", restores="first"),
        launch("other"),
    )
    lost = {"source": "ended with exit code 1"}
    assert skip_reasons(plan, lost, settled=("source",)) == {
        "first": "source: ended with exit code 1",
        "second": "source: ended with exit code 1",
    }


def test_what_runs_already_is_not_skipped() -> None:
    plan = graph(launch("source"), launch("restore", restores="source"))
    assert skip_reasons(plan, {"source": "lost"}, settled=("source", "restore")) == {}


def test_a_step_that_waits_for_nobody_is_an_error() -> None:
    with pytest.raises(UserError, match="'nowhere', which no plan contains"):
        graph(launch("restore", restores="nowhere"))


def test_steps_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(UserError, match="wait for each other: a, b"):
        graph(launch("a", restores="b"), launch("b", restores="a"))


def test_two_cores_hold_two_launches_of_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert Capacity.detect(tmp_path / "none") == Capacity(4)


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(None, ("0", "1")), ("1", ("1",)), ("GPU-a, GPU-b", ("GPU-a", "GPU-b"))],
)
def test_gpus_are_the_visible_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, devices: tuple[str, ...]
) -> None:
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Capacity.detect(tmp_path) == Capacity(len(devices), devices)


def test_hidden_gpus_leave_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "0000:00:00.0").mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Capacity.detect(tmp_path).devices == ()


@st.composite
def forests(draw: st.DrawFn) -> Graph:
    """Up to twelve launches, each restoring at most one before it."""
    steps: list[Launch] = []
    for number in range(draw(st.integers(1, 12))):
        before = [None, *(step.id for step in steps)]
        ranks = draw(st.integers(1, 9))
        steps.append(launch(f"step{number}", ranks, draw(st.sampled_from(before))))
    return graph(*steps)


@given(plan=forests(), size=st.integers(1, 6), gpus=st.booleans())
def test_every_forecast_keeps_the_rules(plan: Graph, size: int, gpus: bool) -> None:
    devices = tuple(str(n) for n in range(size)) if gpus else ()
    table = forecast(plan, Capacity(size, devices))
    assert table.keys() == plan.steps.keys()
    for step_id, (start_s, end_s, own) in table.items():
        step = plan.steps[step_id]
        assert end_s == pytest.approx(start_s + cost_s(step))
        assert all(table[other][1] <= start_s for other in step.after)
        assert len(own) == (min(ranks_of(step), size) if gpus else 0)
        beside = [i for i, (s, e, _) in table.items() if s <= start_s < e]
        assert sum(ranks_of(plan.steps[i]) for i in beside) <= size or beside == [step_id]
        taken = [device for i in beside for device in table[i][2]]
        assert len(taken) == len(set(taken))


@given(plan=forests(), size=st.integers(1, 6))
def test_nothing_that_fits_waits_while_the_machine_is_idle(plan: Graph, size: int) -> None:
    total_s = sum(cost_s(step) for step in plan.steps.values())
    end_s = max(end for _, end, _ in forecast(plan, Capacity(size)).values())
    assert end_s <= total_s + 1e-9
