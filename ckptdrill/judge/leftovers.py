"""Modules that are alive and no part of the training: what a script built and dropped.

A pipeline by hand builds all layers and keeps those of its own stage; the others stay in a list, on
each rank others. They are state that is neither new nor missing where the layers have moved between
ranks. In order: which models nothing of is optimized on any rank of either run; of those, which no
rank changed over the whole run; take away the ones that only one run has, or that went to other
ranks. What is averaged moves, and a frozen model that all ranks of both runs have stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Fact, JsonValue

_PARTS = ("weights", "buffers")
Facts = tuple[Fact, ...]


def taken_off(pair: Pair, source: Facts, target: Facts) -> tuple[Facts, Facts]:
    """The sampled states of both runs without leftovers."""
    if not source or not target or not _have_moved(source, target):
        return source, target
    trained = {label_of(name) for fact in (*source, *target) for name in _members(fact)}
    labels = _labels(source) | _labels(target)
    idle = [label for label in labels if label and label not in trained]
    runs = ((pair.reference, source), (pair.restored, target))
    gone = {
        label
        for label in idle
        if not any(_moves(run, facts, label) for run, facts in runs)
        and _by_rank(source, label) != _by_rank(target, label)
        and not (_replicated(source, label) and _replicated(target, label))
    }
    return (_without(source, gone), _without(target, gone)) if gone else (source, target)


def label_of(name: str) -> str:
    """The model that a name belongs to, as the observer labels it; empty for the first."""
    label, colon, _ = name.partition(":")
    return label if colon else ""


def _have_moved(source: Facts, target: Facts) -> bool:
    """Whether the runs have other ranks, or the ranks other names."""
    if len(source) != len(target):
        return True
    pairs = zip(source, target, strict=True)
    return any(a.data["weights"].keys() != b.data["weights"].keys() for a, b in pairs)


def _members(fact: Fact) -> Iterable[str]:
    return (
        name
        for optimizer in fact.data["groups"]
        for group in optimizer
        for name in group["members"]
    )


def _labels(facts: Facts) -> set[str]:
    return {label_of(name) for fact in facts for part in _PARTS for name in fact.data[part]}


def _held(fact: Fact, label: str) -> Mapping[str, JsonValue]:
    return {
        f"{part} {name}": entry
        for part in _PARTS
        for name, entry in fact.data[part].items()
        if label_of(name) == label
    }


def _by_rank(facts: Facts, label: str) -> Sequence[Mapping[str, JsonValue]]:
    return [_held(fact, label) for fact in facts]


def _replicated(facts: Facts, label: str) -> bool:
    """Whether every rank holds the same of it, as with a frozen teacher."""
    first, *others = _by_rank(facts, label)
    return bool(first) and all(held == first for held in others)


def _moves(run: Trajectory, facts: Facts, label: str) -> bool:
    """Whether a rank held it with other content at any other sampled step. A run that was sampled
    once shows nothing: then it is taken to move.
    """
    before = {fact.rank: _held(fact, label) for fact in facts}
    steps = run.sampled_steps()
    if len(steps) < 2 and any(before.values()):
        return True
    return any(
        held != before[fact.rank]
        for step in steps
        for fact in run.sample("state", step)
        if (held := _held(fact, label)) and before.get(fact.rank)
    )


def _without(facts: Facts, gone: set[str]) -> Facts:
    return tuple(
        structs.replace(
            fact,
            data={
                **fact.data,
                **{
                    part: {n: e for n, e in fact.data[part].items() if label_of(n) not in gone}
                    for part in _PARTS
                },
            },
        )
        for fact in facts
    )
