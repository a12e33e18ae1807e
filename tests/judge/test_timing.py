"""Measured inputs of the ledger: phases that add up, steps of the plain loop, saves."""

from typing import Any

import pytest

from ckptdrill.judge import timing
from ckptdrill.model import Fact, LaunchRecord
from tests.judge.history import healthy


def record(*facts: tuple[str, int, float, dict[str, Any]], rank: int = 0) -> LaunchRecord:
    made = tuple(
        Fact(kind, data.pop("rank", rank), step, {"t": t, **data}, n)
        for n, (kind, step, t, data) in enumerate(facts)
    )
    return LaunchRecord.made_of("x", made, {"returncode": 0}, 2)


def restored(**end: Any) -> LaunchRecord:
    return record(
        ("started", 0, 100.0, {}),
        ("state", 0, 101.0, {"at": "made", "took_s": 0.5}),
        ("load_end", 0, 104.0, {"call": "load", "took_s": 2.0, **end}),
        ("state", 0, 109.0, {"at": "forward", "took_s": 1.0}),
        ("batch", 0, 110.0, {}),
        ("load_end", 4, 120.0, {"call": "load", "took_s": 9.0}),
    )


def test_phases_add_up_to_the_time_before_the_first_batch() -> None:
    found = dict(timing.phases(restored()))
    assert found.pop("merged") == ["read", "deserialize", "reshard"]
    assert found == {"read": 2.0, "initialize": 6.5, "validate": 1.0}


def test_the_slowest_rank_counts() -> None:
    slow = [("started", 0, 100.0, {"rank": 1}), ("batch", 0, 130.0, {"rank": 1})]
    fast = [("started", 0, 100.0, {"rank": 0}), ("batch", 0, 105.0, {"rank": 0})]
    assert timing.phases(record(*slow, *fast))["initialize"] == 30.0


def test_torch_load_does_not_reshard() -> None:
    facts = [f for f in restored(call="torch.load").facts if f.step == 0]
    found = timing.phases(LaunchRecord.made_of("x", facts, {}, 2))
    assert found["merged"] == ["read", "deserialize"]


def test_a_restore_that_came_to_no_batch_has_no_phases() -> None:
    assert timing.phases(record(("started", 0, 1.0, {}))) == {}


def test_only_steps_of_the_plain_loop_are_timed() -> None:
    run = record(
        ("stepped", 1, 10.0, {}),
        ("batch", 1, 10.1, {}),
        ("stepped", 2, 11.0, {}),
        ("state", 2, 12.0, {"at": "forward"}),
        ("batch", 2, 14.0, {}),
        ("stepped", 3, 21.0, {}),
        ("batch", 3, 21.1, {}),
        ("stepped", 4, 24.0, {}),
    )
    assert timing.step_s(run) == 2.0
    assert timing.step_s(record(("stepped", 1, 1.0, {}))) is None
    assert timing.step_s(None) is None


def test_a_save_is_over_when_the_last_rank_is_back() -> None:
    run = record(
        ("save_end", 8, 20.0, {"call": "save", "took_s": 1.0}),
        ("save_end", 8, 21.0, {"call": "save", "took_s": 3.0, "rank": 1}),
        ("save_end", 12, 90.0, {"call": "save", "took_s": 50.0}),
    )
    found = {"step": 1008, "call": "save", "duration_s": 3.0, "ended_s": 21.0}
    assert timing.save(run, 8, 1000) == found
    assert timing.save(run, 9, 0) == timing.save(run, None, 0) == {}


@pytest.mark.parametrize("layouts", [("fsdp2", "fsdp2"), ("fsdp2", "ddp1")])
def test_a_verdict_carries_what_was_measured(layouts: tuple[str, str]) -> None:
    numbers = healthy(*layouts).verdict().numbers
    assert numbers["phases"]["read"] == 0.25
    assert numbers["step_s"] > 0
    assert (numbers["save"]["step"], numbers["save"]["duration_s"]) == (8, 0.1)
