"""The nouns: names people say aloud, and JSON that comes back as what it was."""

import dataclasses
import json

import pytest

from ckptdrill.model import (
    Cell,
    Check,
    Claim,
    Damage,
    DamageKind,
    Expectation,
    Fact,
    Held,
    Item,
    Job,
    LaunchRecord,
    Plan,
    Policy,
    Reason,
    RngPolicy,
    Tolerance,
    Topology,
    Verdict,
    VerdictWord,
    from_json,
    to_json,
)
from ckptdrill.plan import SharedLaunches

VERDICT = Verdict(
    cell_id="a",
    claim=Claim.CONTINUES,
    word=VerdictWord.UNSUPPORTED,
    reason=Reason.DIVERGED,
    explanation="weights",
    blame_item=Item.WEIGHTS,
    blame_subject="mix.weight",
    checks=(Check(Item.WEIGHTS, Held.BROKEN, "mix.weight differs", ("mix.weight",)),),
    facts=("launches/source/rank0.jsonl:3",),
)


@pytest.mark.parametrize(
    ("degrees", "short", "world_size"),
    [
        ({}, "single", 1),
        ({"dp_shard": 4}, "fsdp4", 4),
        ({"dp_replicate": 2}, "ddp2", 2),
        ({"dp_replicate": 2, "dp_shard": 4}, "hsdp2x4", 8),
        ({"dp_shard": 2, "tp": 2}, "fsdp2tp2", 4),
        ({"tp": 2, "pp": 2, "cp": 2}, "tp2pp2cp2", 8),
        ({"dp_shard": 4, "zero_stage": 2}, "zero2dp4", 4),
        ({"dp_shard": 4, "ep": 2}, "fsdp4ep2", 4),
    ],
)
def test_a_topology_has_a_short_name_and_a_size(
    degrees: dict[str, int], short: str, world_size: int
) -> None:
    topology = Topology("any", **degrees)
    assert (topology.short, topology.world_size) == (short, world_size)


def test_layouts_are_compared_without_their_names() -> None:
    assert Topology("a", dp_shard=2).same_layout(Topology("b", dp_shard=2))
    assert not Topology("a", dp_shard=2).same_layout(Topology("a", dp_replicate=2))
    assert Topology("a", dp_shard=8, nodes=2).ranks_per_node == 4


def test_a_job_ends_when_the_window_and_the_last_save_are_done() -> None:
    job = Job("p.py", None, (), (), "{out}", (4, 8), 8, 5, ".")
    assert job.end_step == 13
    assert dataclasses.replace(job, saves=(4, 20)).end_step == 20


def plan(damage: bool = False) -> Plan:
    cell = Cell("cell", Topology("two", dp_shard=2), "default", Topology("one"), "old", "made-up")
    cell = dataclasses.replace(
        cell,
        parameters={"kind": "bit-flip", "list": [1, 2]},
        expect=Expectation(VerdictWord.UNPROVEN, Reason.REFUSED, "known"),
    )
    shared = SharedLaunches(restore_step=8, saves=(4, 8, 12), end_step=13, repeats=1)
    step = Damage("damage.cell", DamageKind.TRUNCATE, shared.checkpoint_of(cell), {"bytes": 3})
    return shared.continues(cell, damage=step if damage else None)


@pytest.mark.parametrize(
    "noun",
    [
        VERDICT,
        plan(),
        plan(damage=True),
        Policy(RngPolicy.RESEEDED, None, {Item.RNG.value: "why"}, {"program": "why"}),
        Tolerance(loss=1e-3),
    ],
    ids=lambda noun: type(noun).__name__,
)
def test_nouns_survive_json(noun: object) -> None:
    stored = json.loads(json.dumps(to_json(noun), allow_nan=False))
    assert from_json(type(noun), stored) == noun


def test_keys_of_a_newer_version_are_ignored() -> None:
    assert from_json(Tolerance, {"loss": 0.5, "shape": "new"}) == Tolerance(loss=0.5)


@pytest.mark.parametrize(
    ("noun", "data", "error"),
    [
        (Verdict, [], TypeError),
        (Verdict, {"cell_id": "a"}, TypeError),
        (Verdict, {**to_json(VERDICT), "word": "Maybe"}, ValueError),
        (Verdict, {**to_json(VERDICT), "checks": ["text"]}, TypeError),
    ],
)
def test_json_of_another_form_is_refused(
    noun: type[object], data: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        from_json(noun, data)


@pytest.mark.parametrize(
    ("expectation", "meets"),
    [
        (None, False),
        (Expectation(VerdictWord.UNSUPPORTED), True),
        (Expectation(VerdictWord.UNSUPPORTED, Reason.DIVERGED), True),
        (Expectation(VerdictWord.UNSUPPORTED, Reason.REFUSED), False),
        (Expectation(VerdictWord.UNPROVEN), False),
    ],
)
def test_a_verdict_meets_what_was_said_in_advance(
    expectation: Expectation | None, meets: bool
) -> None:
    assert VERDICT.meets(expectation) is meets


def test_without_a_word_pass_is_expected() -> None:
    verdict = dataclasses.replace(VERDICT, word=VerdictWord.PASS, reason=Reason.HELD)
    assert verdict.meets(None)
    assert not verdict.meets(Expectation(VerdictWord.UNSUPPORTED))


def test_steps_of_a_plan_come_after_what_they_need() -> None:
    for each in (plan(), plan(damage=True)):
        done: set[str] = set()
        for step in each.steps:
            assert set(step.after) <= done
            done.add(step.id)
        assert len(done) == len(each.steps)


def test_facts_are_found_by_kind_and_rank() -> None:
    facts = tuple(Fact(k, r, 0, {}, n) for n, (k, r) in enumerate([("a", 1), ("b", 0)]))
    record = LaunchRecord.made_of("x", facts, None, 2)
    assert record.of("a") == (facts[0],)
    assert record.of("a", 0) == ()
    assert record.last_steps == {0: 0, 1: 0}
    assert record.ref(facts[1]) == "launches/x/rank0.jsonl:1"
