"""What only an engine of DeepSpeed has: master weights, and a load that finds nothing."""

from typing import Any

from ckptdrill.model import Held, Item, Reason
from tests.judge.history import History, healthy

MASTERS = ("mix.weight.fp32", "embed.weight.fp32")


def with_masters() -> History:
    """Every run has master weights beside the moments."""

    def add(state: dict[str, Any]) -> None:
        for name in MASTERS:
            state["optimizer"][name] = state["weights"][name.removesuffix(".fp32")]

    history = healthy()
    for launch in ("source", "repeat", "baseline", "restore"):
        history = history.edited("state", add, launch=launch)
    return history


def test_moments_that_are_lost_beside_master_weights_are_a_fresh_optimizer() -> None:
    def forget(state: dict[str, Any]) -> None:
        state["optimizer"] = {name: state["optimizer"][name] for name in MASTERS}

    history = with_masters()
    assert history.check(Item.MOMENTS).status is Held.HELD
    forgetful = history.state(forget)
    check = forgetful.check(Item.MOMENTS)
    assert check.status is Held.BROKEN
    assert "but the master weights are missing: a fresh optimizer" in check.summary
    assert forgetful.check(Item.TOPOLOGY).numbers["mechanism"] == "weights-only"


def test_a_master_weight_that_differs_is_named() -> None:
    verdict = with_masters().differs("optimizer", MASTERS[0]).verdict()
    assert (verdict.reason, verdict.blame_subject) == (Reason.DIVERGED, MASTERS[0])


def test_a_load_that_found_nothing_is_told_beside_the_call() -> None:
    history = healthy()
    load = {"path": "/tmp/out", "mechanism": "same layout"}
    empty = history.adding(history.fact("engine_load", found=False, **load))
    found = history.adding(history.fact("engine_load", found=True, **load))
    assert "found nothing to load" in empty.check(Item.TOPOLOGY).summary
    assert "found nothing" not in found.check(Item.TOPOLOGY).summary
