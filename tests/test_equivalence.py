"""A warm launch is like a cold one when only what every two launches differ in differs."""

from typing import Any

import pytest

from ckptdrill.equivalence import equivalent
from ckptdrill.model import Fact, LaunchRecord


def record(launch_id: str, *facts: tuple[str, dict[str, Any]], ranks: int = 1) -> LaunchRecord:
    lines = tuple(
        Fact(kind, rank, 3, data, number)
        for rank in range(ranks)
        for number, (kind, data) in enumerate(facts)
    )
    return LaunchRecord.made_of(launch_id, lines, None, ranks)


def compare(kind: str, cold: dict[str, Any], warm: dict[str, Any]) -> tuple[bool, str | None]:
    return equivalent(record("source.a", (kind, cold)), record("repeat1.a", (kind, warm)))


@pytest.mark.parametrize(
    ("kind", "cold", "warm"),
    [
        ("started", {"pid": 1}, {"pid": 2}),
        ("save_end", {"took_s": 0.1}, {"took_s": 0.2}),
        ("started", {"arguments": ["/r/source.a/out"]}, {"arguments": ["/r/repeat1.a/out"]}),
        ("rng", {"kinds": {"python": "a", "torch": "x"}}, {"kinds": {"numpy": "b", "torch": "x"}}),
        ("stepped", {"losses": [float("nan")]}, {"losses": [float("nan")]}),
        ("exited", {"code": 0, "pid": 1}, {"code": 0, "pid": 2}),
    ],
)
def test_what_any_two_launches_differ_in_is_no_difference(
    kind: str, cold: dict[str, Any], warm: dict[str, Any]
) -> None:
    assert compare(kind, cold, warm) == (True, None)


@pytest.mark.parametrize(
    ("kind", "cold", "warm", "said"),
    [
        ("stepped", {"losses": [1.0]}, {"losses": [1.5]}, "losses is [1.0] cold, [1.5] warm"),
        ("stepped", {"lr": 1}, {"lr": 1.0}, "lr is 1 cold, 1.0 warm"),
        ("rng", {"kinds": {"torch": "x"}}, {"kinds": {"torch": "y"}}, "kinds.torch"),
        ("state", {"tensors": {"at": "x"}}, {"tensors": {"at": "y"}}, "tensors.at"),
        ("state", {"tensors": {"w": 1}}, {"tensors": {}}, "tensors.w is only recorded cold"),
        ("started", {}, {"device": "cpu"}, "device is only recorded warm"),
    ],
)
def test_any_other_difference_is_named(
    kind: str, cold: dict[str, Any], warm: dict[str, Any], said: str
) -> None:
    same, difference = compare(kind, cold, warm)
    assert not same
    assert str(difference).startswith(f"{kind}, rank 0: ")
    assert said in str(difference)


@pytest.mark.parametrize("length", [60, 200, 2000])
def test_what_is_shown_of_long_values_is_where_they_part(length: int) -> None:
    _, difference = compare(
        "started",
        {"path": "x" * length + "cold" + "y" * length},
        {"path": "x" * length + "warm" + "y" * length},
    )
    assert "xcoldy" in str(difference)
    assert "xwarmy" in str(difference)
    assert len(str(difference)) < 300


def test_a_missing_fact_is_a_difference() -> None:
    cold = record("source.a", ("stepped", {}), ("stepped", {}))
    warm = record("repeat1.a", ("stepped", {}))
    assert equivalent(cold, warm) == (False, "stepped, rank 0: 2 facts cold, 1 warm")


def test_every_rank_counts() -> None:
    cold = record("source.a", ("stepped", {}), ranks=2)
    warm = record("repeat1.a", ("stepped", {}), ranks=1)
    assert equivalent(cold, warm) == (False, "stepped, rank 1: 1 facts cold, 0 warm")


def test_no_facts_prove_nothing() -> None:
    assert equivalent(record("source.a"), record("repeat1.a"))[0] is False
