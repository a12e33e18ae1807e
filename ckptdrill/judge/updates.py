"""Judge the first updates: direction and size of what the optimizer did right after the restore.

A projection is linear, so its difference between two steps is the projection of the update; over
all
parameters that gives cosine and norm ratio to the reference's update without a stored tensor. A
fresh
optimizer, a lost scaler or a wrong batch shows here even where the loss is still the same.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import nsmallest

from ckptdrill.columns import Layout, Part
from ckptdrill.judge.allowed import Allowed
from ckptdrill.judge.lanes import is_pending
from ckptdrill.judge.logical import Same, is_entry
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Check, Held, Item, JsonValue

# Updates are small beside the weights they are read from: one float32 ulp of the weights is already
# this large a part of a typical update.
FLOOR = 1e-3
PROJECTIONS = 8  # of a tensor (observer/fingerprint.py); what stands behind them is its size
_SHOWN = 5  # parameters that are named beside the numbers of all together

Vectors = Mapping[str, Sequence[float]]


def first(pair: Pair, allowed: Allowed, left_out: frozenset[str] = frozenset()) -> Check:
    """The update of the first step after the restore, beside the reference's.

    `left_out` are parameters that are not compared: those that ranks hold in parts, and those whose
    gradient is rounding and nothing else.
    """
    step = pair.restore_step + 1
    wanted, found = update(pair.reference, step), update(pair.restored, step)
    # Names that only one run has are the keys' matter.
    names = (wanted.keys() & found.keys()) - left_out
    if names != wanted.keys() or names != found.keys():
        wanted, found = ({n: v[n] for n in sorted(names)} for v in (wanted, found))
    refs = tuple(
        ref
        for run in (pair.reference, pair.restored)
        for s in (step - 1, step)
        for ref in run.record.refs(run.sample("state", s))
    )
    lost = lost_sample(pair.reference, step) or lost_sample(pair.restored, step)
    if not lost and not names and left_out:
        what = (
            "not compared by itself: ranks hold every parameter in parts; state, rates and the "
            "sizes of the first gradients say what follows"
        )
        return Check(Item.UPDATES, Held.HELD, what, facts=refs)
    if lost or not names:
        what = lost or "state around the first step was not recorded"
        return Check(Item.UPDATES, Held.NOT_OBSERVED, what, facts=refs)
    if not any(any(v) for v in wanted.values()):
        return Check(
            Item.UPDATES,
            Held.NOT_EXERCISED,
            "the reference's first step changes no parameter",
            facts=refs,
            next_move="restore at a step whose learning rate is not zero",
        )
    if allowed.noisy:
        what = f"the reference does not reproduce itself: {allowed.noisy}"
        return Check(Item.UPDATES, Held.NOT_OBSERVED, what, facts=refs)
    control = [allowed.control] if allowed.control else []
    by_topology = allowed.safety * _furthest_of(control, wanted, step)
    by_repeats = allowed.safety * _furthest_of(allowed.repeats, wanted, step)
    band = max(by_repeats, min(by_topology, allowed.update_ceiling), FLOOR)
    of_states = pair.derived_from("state")
    beside = of_states.once(("update", step, left_out), lambda: _side_by_side(wanted, found))
    return replace(_compared(step, beside, band, allowed.unmeasured), facts=refs)


def _furthest_of(runs: Sequence[Trajectory], wanted: Vectors, step: int) -> float:
    """How far the furthest of these runs is from an update that they should have made, too."""
    others = (update(run, step) for run in runs if not lost_sample(run, step))
    return max((relative_distance(wanted, other) for other in others if other), default=0.0)


def _side_by_side(wanted: Vectors, found: Vectors) -> Mapping[str, JsonValue]:
    """The numbers of two updates of the same parameters."""
    return {
        "cosine": cosine(wanted, found),
        "norm_ratio": norm_ratio(wanted, found),
        "distance": relative_distance(wanted, found),
        "furthest": _furthest(wanted, found),
    }


def _compared(
    step: int, beside: Mapping[str, JsonValue], band: float, unmeasured: str | None
) -> Check:
    """The row for two updates, without its facts."""
    numbers = {"step": step, "band": band, **beside}
    distance = numbers["distance"]
    shown = (
        f"cosine {numbers['cosine']:.6f}, norm ratio {numbers['norm_ratio']:.6f}; "
        f"distance {distance:.2g}, band {band:.2g}"
    )
    if distance <= band:
        return Check(Item.UPDATES, Held.HELD, shown, numbers=numbers)
    if unmeasured:
        what = f"{shown}, but how far it may differ is not known: {unmeasured}"
        return Check(Item.UPDATES, Held.NOT_OBSERVED, what, numbers=numbers)
    what = f"the first update differs: {shown}"
    return Check(Item.UPDATES, Held.BROKEN, what, tuple(numbers["furthest"]), numbers=numbers)


def _furthest(wanted: Vectors, found: Vectors) -> dict[str, list[float]]:
    """[cosine, norm ratio] of the parameters whose update is furthest from the reference's, by the
    size of the difference.
    """
    names = nsmallest(_SHOWN, wanted, key=lambda n: (-_gap(wanted[n], found.get(n, ())), n))
    pairs = [({n: wanted[n]}, {n: found.get(n, ())}) for n in names]
    return {n: [cosine(*p), norm_ratio(*p)] for n, p in zip(names, pairs, strict=True)}


def update(run: Trajectory, step: int) -> Vectors:
    """Projection of each parameter's change in the step that completes `step`; empty if
    unobserved.
    """

    def change() -> Vectors:
        before, after = projections(run, step - 1), projections(run, step)
        return {
            name: [b - a for a, b in zip(before[name], after[name], strict=True)]
            for name in sorted(before.keys() & after.keys())
        }

    return run.derived_from("state").once(("update", step), change)


def lost_sample(run: Trajectory, step: int) -> str | None:
    """The first rank without a sample before or after the step, in words: its shards are in no sum
    then.
    """
    for sampled in (step - 1, step):
        silent = run.silent(run.sample("state", sampled))
        if silent:
            return f"rank {silent[0]} of {run.record.launch_id} recorded no state at step {sampled}"
    return None


def projections(run: Trajectory, step: int) -> Vectors:
    """Sum of the projections of each parameter's distinct shards."""
    return _summed(Same(run.sample("state", step)))


@lru_cache(maxsize=64)
def _summed(facts: Same) -> Vectors:
    columns = _in_columns(facts)
    if columns is not None:
        return columns
    found: dict[str, dict[str, Sequence[float]]] = {}
    for fact in facts.facts:
        for name, values in fact.data.get("projections", {}).items():
            entry = fact.data["weights"].get(name)
            if is_entry(entry) and not is_pending(entry):
                found.setdefault(name, {})[repr(entry[2:4])] = values
    return summed(found)


def summed(shards: Mapping[str, Mapping[str, Sequence[float]]]) -> Vectors:
    """The projections of whole tensors from those of their distinct shards, by name and place."""
    return {
        name: [sum(column) for column in zip(*places.values(), strict=True)]
        for name, places in shards.items()
    }


def _in_columns(facts: Same) -> Vectors | None:
    """The same from columns as they stand; None where some fact has none."""
    both = [(f.data.get("projections"), f.data["weights"]) for f in facts.facts]
    parts = [(p, w) for p, w in both if isinstance(p, Part) and isinstance(w, Part)]
    if not parts or len(parts) != len(both):
        return None
    return _added(tuple(parts))


@lru_cache(maxsize=64)
def _added(parts: tuple[tuple[Part, Part], ...]) -> Vectors | None:
    sources = _sources(tuple((p.layout, w.layout) for p, w in parts))
    rows = [p.floats for p, _ in parts]
    if sources is None:
        return None
    return {
        name: [sum(column) for column in zip(*(rows[f][a:b] for f, a, b in at), strict=True)]
        for name, at in sources.items()
    }


@lru_cache(maxsize=256)
def _sources(
    layouts: tuple[tuple[Layout, Layout], ...],
) -> Mapping[str, Sequence[tuple[int, int, int]]] | None:
    """Parameter -> (fact, begin, end) of the floats of each of its distinct shards."""
    if any(form.kind != "floats" for p, _ in layouts for form in p.forms.values()):
        return None
    found: dict[str, dict[str, tuple[int, int, int]]] = {}
    for fact, (projections, weights) in enumerate(layouts):
        for name, form in projections.forms.items():
            place = weights.forms.get(name)
            if place is not None and place.is_tensor and not is_pending(place.head):
                floats = (fact, form.float_at, form.float_at + form.count)
                found.setdefault(name, {})[repr(place.head[2:])] = floats
    return {name: tuple(shards.values()) for name, shards in found.items()}


def relative_distance(wanted: Vectors, found: Vectors) -> float:
    """|found - wanted| / |wanted| over all parameters together."""
    norm = _norm(wanted)
    gap = math.hypot(*(_gap(v, found.get(name, ())) for name, v in wanted.items()))
    return gap / norm if norm else math.inf


def cosine(wanted: Vectors, found: Vectors) -> float:
    """Cosine of the angle between both updates, estimated from the projections."""
    both = [(v, found[name]) for name, v in wanted.items() if name in found]
    dot = sum(sum(map(operator.mul, a, b)) for a, b in both)
    return dot / max(_norm(wanted) * _norm(found), 1e-300)


def norm_ratio(wanted: Vectors, found: Vectors) -> float:
    """|found| / |wanted|."""
    return _norm(found) / max(_norm(wanted), 1e-300)


def _norm(vectors: Vectors) -> float:
    return math.hypot(*itertools.chain.from_iterable(vectors.values()))


def _gap(wanted: Sequence[float], found: Sequence[float]) -> float:
    if len(wanted) != len(found):
        return math.hypot(*wanted)
    return math.dist(wanted, found)
