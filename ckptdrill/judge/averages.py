"""Judge the copies of the weights that a job holds in plain dicts and lists: which of them are
averages, and did those come back?

Many a collection that has the parameters' shapes is no state: clones made anew in every step,
gradients, a snapshot, the checkpoint that was read. An average is told from them by how it moves:
it goes a part of the way from where it is to where the weights are, the same part in every
parameter, neither none nor all. Projections are linear, so they show that without a stored tensor.
Only what moves like this in the source is held against the restored run; of the rest it is said
that it differs, no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptdrill.judge.logical import Logical, combine, is_entry
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.judge.updates import PROJECTIONS, Vectors, projections, summed
from ckptdrill.model import Fact

# How far, relative to its length, a step of an average may be off the way to the weights: with a
# decay of 0.9999 the round-off of float32 is some hundredths of a step.
_OFF_THE_WAY = 0.05
_WHOLE_WAY = 0.999
_SAME_SIZE = 1e-9  # sums of the same squares in another order
# Of the way between average and weights: as much of an average must be lost to be called so when
# nothing stood at the first forward to be compared bit by bit.
_LOST = 0.05


@dataclass(frozen=True)
class Copy:
    """One copy of the weights at one step, all ranks together, by the names of the parameters."""

    tensors: Mapping[str, Logical]
    vectors: Vectors
    size: float | None = None  # of all distinct content, also where ranks hold parts

    @property
    def in_parts(self) -> bool:
        """Ranks hold different content under one name."""
        return any(tensor.by_rank for tensor in self.tensors.values())


def copies(run: Trajectory, step: int) -> Mapping[str, Copy]:
    """Every copy that was seen at a completed step, by the name that the job holds it under."""

    def found() -> Mapping[str, Copy]:
        by_name: dict[str, list[Fact]] = {}
        for fact in _held(run).get(step, ()):
            by_name.setdefault(fact.data["name"], []).append(fact)
        return {
            name: Copy(combine(facts, "leaves"), _vectors(facts), _size(facts))
            for name, facts in by_name.items()
        }

    return run.derived_from("inventory").once(("copies", step), found)


def lost(pair: Pair) -> list[str]:
    """The averages of the source that did not come back, in words that begin with their names."""
    named = sorted(copies(pair.reference, pair.restore_step))
    averages = [name for name in named if _is_average(pair.reference, name)]
    return [text for name in averages if (text := _problem(pair, name))]


def in_doubt(pair: Pair) -> list[str]:
    """Other copies that change in the source and still differ at the end: perhaps state."""
    if not pair.compared:
        return []
    last = pair.compared[-1]
    before, now, then = (
        copies(run, step)
        for run, step in ((pair.reference, last - 1), (pair.restored, last), (pair.reference, last))
    )
    return [
        name
        for name in sorted(before.keys() & now.keys() & then.keys())
        if _differ(before[name], then[name])
        and _way(then[name].vectors, now[name].vectors) > _LOST
        and not _is_average(pair.reference, name)
    ]


def held_otherwise(pair: Pair) -> list[str]:
    """Copies that both runs hold before the first step after the restore, and not the same."""
    then, now = (copies(run, pair.restore_step) for run in (pair.reference, pair.restored))
    return [
        f"{name} differs"
        for name in sorted(then.keys() & now.keys())
        if _differ(then[name], now[name])
    ]


def _problem(pair: Pair, name: str) -> str | None:
    """What became of one average; None when it came back, or when that was not seen."""
    at = pair.restore_step
    wanted, found = copies(pair.reference, at)[name], copies(pair.restored, at).get(name)
    if found is not None:
        if not _differ(wanted, found):
            return None
        instead = _instead(pair, name, found)
        return f"{name} differs from the reference's average of the weights{instead}"
    then, now = copies(pair.reference, at + 1).get(name), copies(pair.restored, at + 1).get(name)
    if then is None or now is None:
        return None
    weights = projections(pair.reference, at + 1)
    room = _gap(then.vectors, weights)
    if room and _gap(then.vectors, now.vectors) > _LOST * room:
        return (
            f"{name}, an average of the weights in the reference, was begun anew in the first step"
        )
    return None


def _instead(pair: Pair, name: str, found: Copy) -> str:
    """What stands in place of an average, where it is known."""
    at = pair.restore_step
    if not _other_than(found, combine(pair.reference.sample("state", at), "weights")):
        return "; it equals the restored weights: the average begins anew"
    if not _other_than(found, combine(pair.restored.sample("state", at, "made"), "weights")):
        return "; it equals the weights before anything was restored"
    for step in pair.reference.sampled_steps():
        other = copies(pair.reference, step).get(name)
        if other is not None and not _differ(other, found):
            return f"; it equals that of step {step}"
    return ""


# ---------------------------------------------------------------------------- how an average moves


def _is_average(run: Trajectory, name: str) -> bool:
    """A copy that goes towards the weights whenever it moves. It may begin as equal to them."""

    def nears() -> bool:
        seen = [step for step in run.sampled_steps() if name in copies(run, step)]
        moved = [
            step
            for step in seen
            if step - 1 in seen and _differ(copies(run, step - 1)[name], copies(run, step)[name])
        ]
        plain = [step for step in moved if _is_plain(run, name, step)]
        towards = [step for step in moved if step not in plain]
        return bool(towards) and all(_nears(run, name, step) for step in towards)

    return run.derived_from("inventory", "state").once(("average", name), nears)


def _is_plain(run: Trajectory, name: str, step: int) -> bool:
    """Whether the copy equals the weights of this step or the last."""
    return any(
        not _other_than(copies(run, step)[name], combine(run.sample("state", when), "weights"))
        for when in (step, step - 1)
    )


def _nears(run: Trajectory, name: str, step: int) -> bool:
    """Whether the copy went a part of the way to the weights in the step that completes `step`, to
    those after the step or to those before it.
    """
    before, after = copies(run, step - 1)[name], copies(run, step)[name]
    return any(
        _on_the_way(before.vectors, after.vectors, projections(run, when))
        for when in (step, step - 1)
    )


def _on_the_way(before: Vectors, after: Vectors, weights: Vectors) -> bool:
    names = sorted(before.keys() & after.keys() & weights.keys())
    moved = [b - a for n in names for a, b in zip(before[n], after[n], strict=True)]
    way = [w - a for n in names for a, w in zip(before[n], weights[n], strict=True)]
    square = sum(x * x for x in way)
    part = sum(x * y for x, y in zip(moved, way, strict=True)) / square if square else 0.0
    off = math.hypot(*(x - part * y for x, y in zip(moved, way, strict=True)))
    return 0.0 < part < _WHOLE_WAY and off <= _OFF_THE_WAY * math.hypot(*moved)


# ------------------------------------------------------------------------------------- comparisons


def _differ(one: Copy, other: Copy) -> bool:
    if (one.in_parts or other.in_parts) and one.size is not None and other.size is not None:
        return not math.isclose(one.size, other.size, rel_tol=_SAME_SIZE)
    return _other_than(one, other.tensors)


def _other_than(copy: Copy, tensors: Mapping[str, Logical]) -> bool:
    """Whether a parameter of both is not bitwise equal, of those that all ranks agree on."""
    names = copy.tensors.keys() & tensors.keys()
    pairs = [(copy.tensors[name], tensors[name]) for name in names]
    whole = [
        (a, b) for a, b in pairs if a.complete and b.complete and not a.by_rank and not b.by_rank
    ]
    return not names or any(a.content != b.content for a, b in whole)


def _way(one: Vectors, other: Vectors) -> float:
    """Relative distance of two copies."""
    return _gap(one, other) / (math.hypot(*(x for v in one.values() for x in v)) or math.inf)


def _gap(one: Vectors, other: Vectors) -> float:
    names = one.keys() & other.keys()
    return math.hypot(*(a - b for n in names for a, b in zip(one[n], other[n], strict=True)))


def _vectors(facts: Sequence[Fact]) -> Vectors:
    """Sums of the projections of each parameter's distinct shards."""
    found: dict[str, dict[str, Sequence[float]]] = {}
    for fact in facts:
        for name, leaf in fact.data["leaves"].items():
            if isinstance(leaf, dict) and is_entry(leaf.get("entry")) and "projection" in leaf:
                numbers = leaf["projection"][:PROJECTIONS]
                found.setdefault(name, {})[repr(leaf["entry"][2:4])] = numbers
    return summed(found)


def _size(facts: Sequence[Fact]) -> float | None:
    """The size of all that ranks hold of a copy, each content once; None where it is not told."""
    squares: dict[tuple[str, str], float] = {}
    for fact in facts:
        for name, leaf in fact.data["leaves"].items():
            if isinstance(leaf, dict) and len(leaf.get("projection", ())) > PROJECTIONS:
                squares[name, repr(leaf["entry"])] = leaf["projection"][PROJECTIONS]
    return math.sqrt(math.fsum(squares.values())) if squares else None


def _held(run: Trajectory) -> Mapping[int, list[Fact]]:
    """Completed step -> the copies held there."""

    def held() -> Mapping[int, list[Fact]]:
        by_step: dict[int, dict[tuple[int, str], Fact]] = {}
        for fact in run.record.of("inventory"):
            if fact.data["at"] == "held":  # of a step that is sampled twice, the last
                key = (fact.rank, fact.data["name"])
                by_step.setdefault(fact.step + run.offset, {})[key] = fact
        return {step: list(facts.values()) for step, facts in by_step.items()}

    return run.derived_from("inventory").once("held", held)
