"""Random state by what the owner declared: continued, reseeded, not guaranteed, or nothing."""

from typing import Any

import pytest

from ckptdrill.model import Held, Item, Policy, Reason, RngPolicy, VerdictWord
from tests.judge.history import History, healthy
from tests.judge.training import Training

CONTINUED = Policy(rng_other_world_size=RngPolicy.CONTINUED)
RESEEDED = Policy(RngPolicy.RESEEDED, RngPolicy.RESEEDED)


def reseeded(history: History, **where: Any) -> History:
    """The restored ranks begin with another torch stream, each its own."""
    for rank in history.record("restore").ranks:
        seed = f"{rank:032x}"
        history = history.edited(
            "rng", lambda rng, s=seed: rng["kinds"].update(torch=s), rank=rank, step=0, **where
        )
    return history


def test_a_stream_that_does_not_continue_is_blamed_by_kind_and_rank() -> None:
    verdict = reseeded(healthy()).verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.RNG)
    assert verdict.blame_subject == "torch on rank 0 differs from the reference"
    assert "(and 1 more)" in verdict.explanation


def test_a_generator_that_nobody_draws_from_cannot_be_blamed() -> None:
    history = healthy().edited("rng", lambda rng: rng["kinds"].update(python="0" * 32))
    check = history.check(Item.RNG)
    assert check.status is Held.HELD
    assert "python" in check.details[0]


def test_a_job_that_draws_nothing_has_not_exercised_the_item() -> None:
    verdict = healthy(job=Training(draws=False)).verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.NOT_EXERCISED, Item.RNG)
    assert "dropout" in verdict.next_move


def test_without_a_declaration_another_world_size_stays_unproven() -> None:
    verdict = healthy("fsdp2", "fsdp4", policy=Policy()).verdict()
    assert (verdict.word, verdict.blame_item) == (VerdictWord.UNPROVEN, Item.RNG)
    assert verdict.reason is Reason.EVIDENCE_MISSING
    assert "policy.rng.other_world_size" in verdict.next_move


def test_the_default_for_the_same_world_size_is_that_it_continues() -> None:
    assert healthy("fsdp2", "ddp2", policy=Policy()).check(Item.RNG).status is Held.HELD


def test_not_guaranteed_is_out_of_scope_whatever_it_is() -> None:
    policy = Policy(rng_same_world_size=RngPolicy.NOT_GUARANTEED)
    history = reseeded(healthy(policy=policy))
    assert history.check(Item.RNG).status is Held.OUT_OF_SCOPE
    assert history.verdict().word is VerdictWord.PASS


@pytest.mark.parametrize(("target", "status"), [("ddp1", Held.HELD), ("ddp4", Held.BROKEN)])
def test_ranks_that_are_new_have_nothing_to_continue(target: str, status: Held) -> None:
    check = healthy("ddp2", target, policy=CONTINUED).check(Item.RNG)
    assert check.status is status
    assert ("rank 2 is new" in check.summary) == (status is Held.BROKEN)


def test_reseeded_streams_may_be_any_but_not_all_the_same() -> None:
    assert reseeded(healthy(policy=RESEEDED)).check(Item.RNG).status is Held.HELD
    same = healthy(policy=RESEEDED).edited("rng", lambda r: r["kinds"].update(torch="1"), step=0)
    check = same.check(Item.RNG)
    assert check.status is Held.BROKEN
    assert "same stream" in check.summary


def test_a_source_that_shares_one_stream_may_be_reseeded_to_one() -> None:
    def one(rng: dict[str, Any]) -> None:
        rng["kinds"]["torch"] = "1"

    history = healthy(policy=RESEEDED).edited("rng", one).edited("rng", one, launch="source")
    assert history.check(Item.RNG).status is Held.HELD


@pytest.mark.parametrize("launch", ["source", "restore"])
def test_a_rank_without_random_state_proves_nothing(launch: str) -> None:
    check = healthy().without("rng", launch=launch, rank=1).check(Item.RNG)
    assert check.status is Held.NOT_OBSERVED
    assert check.summary.startswith("rank 1 of ")


def _generator_on(history: History, launch: str, rank: int, state: str) -> History:
    """A layer's own generator, held by one rank only, drawn from in every step."""

    def edit(rng: dict[str, Any]) -> None:
        rng["kinds"]["layer.generator"] = state + rng["kinds"]["torch"]

    return history.edited("rng", edit, launch=launch, rank=rank)


def test_a_generator_that_moved_to_another_rank_went_along_with_its_layer() -> None:
    history = _generator_on(_generator_on(healthy("ddp2"), "source", 1, ""), "restore", 0, "")
    same = history.edited(
        "rng", lambda rng: rng["kinds"].update({"layer.generator": "a"}), launch="source", rank=1
    ).edited("rng", lambda rng: rng["kinds"].update({"layer.generator": "a"}), rank=0)
    assert "layer.generator" not in same.check(Item.RNG).summary


def test_a_generator_that_moved_and_started_again_is_blamed() -> None:
    history = _generator_on(_generator_on(healthy("ddp2"), "source", 1, ""), "restore", 0, "x")
    check = history.check(Item.RNG)
    assert check.status is Held.BROKEN
    assert "layer.generator" in check.summary
