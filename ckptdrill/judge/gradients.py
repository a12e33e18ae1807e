"""Judge the first gradients: from equal state and samples they are the same at every topology.

An update tells the same later and blurred (Adam blows rounding up), and a band that is taken from
an uninterrupted run at the target excuses whatever the target does too. So the gradient that the
optimizer was handed is laid beside the reference's, whole and parameter by parameter, against
limits that follow from the coarsest type of number on the way, never from a run that has drifted.
In order: put the ranks' pieces together; compare at the first steps after the restore, and at the
first steps of the source and of the control, which begin alike; say what a difference looks like.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptdrill.judge import parts
from ckptdrill.judge.lanes import is_pending
from ckptdrill.judge.logical import combine, is_entry
from ckptdrill.judge.trajectory import Trajectory
from ckptdrill.judge.updates import PROJECTIONS, cosine, norm_ratio, relative_distance
from ckptdrill.model import Fact, JsonValue

# How far gradients of equal state and samples may be apart, as a part of their size: measured on
# healthy jobs (float32 3e-7, bfloat16 2.4e-3), with room for small models and cancelling samples.
LIMITS = {
    "float64": 1e-6,
    "float32": 3e-4,
    "float16": 6e-3,
    "bfloat16": 2e-2,
}
_COARSER = 0.2  # 8-bit types and whatever is not known here
# One step on, the weights differ by the rounding that the first update has blown up.
_LATER = {"float64": 1e-4, "float32": 5e-3}
_LATER_FACTOR = 3.0
# The sizes alone are not blurred by the direction of rounding.
_SIZE_LIMITS = {"float16": 3e-3, "bfloat16": 6e-3}
_MOST = 0.25  # no noise excuses more than this
# A parameter is another one from here on: beside its own gradient, and beside that of all together.
_OWN, _SHARE = 10.0, 0.1
_SHOWN = 6
_TO_WHOLE_FACTOR = 0.02  # how near a factor must be to that of all

Vectors = Mapping[str, Sequence[float]]
Place = tuple[int, str, bool]
"""Which part of a tensor in parts, offsets and sizes, and whether it is a term of a sum."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one step, put together from all ranks.

    `whole` has the projections of tensors that every rank holds whole or in known places, and
    `squares` the sums of squares of the same; `parts` is the sum of squares of all that ranks hold
    under one name in different parts. `uneven` are names whose replicas were handed different
    gradients: the mean and the sum of them; `drifting` the same of what looks like parts and was
    equal on all ranks in the first sample.
    """

    whole: Vectors
    squares: Mapping[str, float]
    parts: Mapping[str, float]
    uneven: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    dtype: str
    drawn: bool
    facts: tuple[Fact, ...] = ()
    drifting: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Compared:
    """Two gradients side by side. `told` says what the difference looks like; None: there is none.

    `unknown` are names that could not be compared.
    """

    step: int
    dtype: str
    limit: float
    distance: float
    ratio: float
    cosine: float
    drawn: bool
    told: str | None = None
    subjects: tuple[str, ...] = ()
    furthest: Mapping[str, Sequence[float]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @property
    def numbers(self) -> dict[str, JsonValue]:
        """What the row shows."""
        return {
            "step": self.step,
            "dtype": self.dtype,
            "band": self.limit,
            "distance": self.distance,
            "norm_ratio": self.ratio,
            "cosine": self.cosine,
            "drawn": self.drawn,
            "furthest": {name: list(each) for name, each in self.furthest.items()},
        }


def gradient(run: Trajectory, step: int) -> Gradient | None:
    """The gradient of the step that completes `step`; None where some rank told none."""
    kinds = ("gradient", "state", "stepped")
    return run.derived_from(*kinds).once(("gradient", step), lambda: _gradient(run, step))


def _gradient(run: Trajectory, step: int) -> Gradient | None:
    facts = tuple(f for f in run.record.of("gradient") if f.data["of"] + run.offset == step)
    if not facts or run.silent(facts):
        return None
    alike = _replicas(run)
    pieces: dict[str, dict[Place, list[Sequence[float]]]] = {}
    for fact in facts:
        for name, leaf in fact.data["leaves"].items():
            if isinstance(leaf, dict) and is_entry(leaf.get("entry")):
                entry, part = leaf["entry"], alike.get(name, {}).get(fact.rank, 0)
                key = (part, repr(entry[2:4]), is_pending(entry))
                pieces.setdefault(name, {}).setdefault(key, []).append(leaf["projection"])
    dtypes = {d for f in facts for d in f.data["dtypes"]} | _types(facts)
    found = Gradient({}, {}, {}, {}, coarsest(dtypes, facts), _any(facts, "drawn"), facts)
    return _put_together(found, pieces, alike, _equal_at_first(run))


def _put_together(
    about: Gradient,
    pieces: Mapping[str, Mapping[Place, list[Sequence[float]]]],
    alike: Mapping[str, Mapping[int, int]],
    equal_at_first: frozenset[str],
) -> Gradient:
    limit = LIMITS.get(about.dtype, _COARSER)
    whole: dict[str, Sequence[float]] = {}
    squares: dict[str, float] = {}
    cut: dict[str, float] = {}
    uneven: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    drifting: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for name, places in pieces.items():
        differ = any(_apart(copies) > limit for copies in places.values())
        in_parts = len(set(alike.get(name, {}).values())) > 1
        if differ and not in_parts and len(places) == 1:
            (copies,) = places.values()
            uneven[name] = _mean_and_sum(copies)
        elif in_parts:
            if name in equal_at_first:
                drifting[name] = _mean_and_sum([copies[0] for copies in places.values()])
            cut[name] = math.nan if differ else sum(c[0][-1] for c in places.values())
        else:
            columns = zip(*(copies[0] for copies in places.values()), strict=True)
            *whole[name], squares[name] = map(sum, columns)
            if any(pending for *_, pending in places):
                del squares[name]  # of the terms of a sum squares do not add up
    return replace(about, whole=whole, squares=squares, parts=cut, uneven=uneven, drifting=drifting)


def _mean_and_sum(copies: Sequence[Sequence[float]]) -> tuple[Sequence[float], Sequence[float]]:
    total = [sum(column) for column in zip(*copies, strict=True)]
    return [value / len(copies) for value in total], total


def _apart(copies: Sequence[Sequence[float]]) -> float:
    """How far the furthest of several replicas is from the first, as a part of its size."""
    first = copies[0]
    size = math.hypot(*first[:PROJECTIONS])
    gap = max(math.dist(first[:PROJECTIONS], other[:PROJECTIONS]) for other in copies)
    return gap / size if size else (0.0 if gap == 0.0 else math.inf)


def _replicas(run: Trajectory) -> Mapping[str, Mapping[int, int]]:
    """Name -> rank -> which part of it that rank holds, for names of which ranks hold different
    content or shapes at one place: replicas are equal whenever they were sampled.
    """

    def replicas() -> Mapping[str, Mapping[int, int]]:
        seen: dict[str, dict[int, list[str]]] = {}
        places: dict[str, dict[str, set[str]]] = {}
        for step in run.sampled_steps():
            for fact in run.sample("state", step):
                for name, entry in fact.data["weights"].items():
                    if is_entry(entry) and _is_plain(entry):
                        seen.setdefault(name, {}).setdefault(fact.rank, []).append(repr(entry))
                        places.setdefault(name, {}).setdefault(str(step), set()).add(repr(entry))
        cut = [n for n, by_step in places.items() if any(len(e) > 1 for e in by_step.values())]
        return {name: _numbered(seen[name]) for name in cut}

    return run.derived_from("state").once("replicas", replicas)


def _equal_at_first(run: Trajectory) -> frozenset[str]:
    """Those of the names in parts that all ranks held alike when they were sampled first: replicas
    that have drifted apart, or parts that began with one value.
    """
    first = run.sample("state", next(iter(run.sampled_steps()), 0))
    held: dict[str, set[str]] = {}
    for fact in first:
        for name in _replicas(run).keys() & fact.data["weights"].keys():
            held.setdefault(name, set()).add(repr(fact.data["weights"][name]))
    return frozenset(name for name, entries in held.items() if len(entries) == 1)


def in_parts(run: Trajectory) -> frozenset[str]:
    """The names under which ranks hold different parts, as far as was sampled."""
    return frozenset(_replicas(run))


def _is_plain(entry: Sequence[JsonValue]) -> bool:
    return bool(entry[1] == entry[3]) and not any(entry[2])


def _numbered(by_rank: Mapping[int, Sequence[str]]) -> Mapping[int, int]:
    numbers: dict[tuple[str, ...], int] = {}
    return {
        rank: numbers.setdefault(tuple(entries), len(numbers))
        for rank, entries in sorted(by_rank.items())
    }


def _any(facts: Iterable[Fact], key: str) -> bool:
    return any(fact.data.get(key) for fact in facts)


def _types(facts: Iterable[Fact]) -> set[str]:
    """The types of the gradients themselves."""
    leaves = (leaf for fact in facts for leaf in fact.data["leaves"].values())
    return {leaf["entry"][0] for leaf in leaves if isinstance(leaf, dict)}


def coarsest(dtypes: Iterable[str], facts: Iterable[Fact]) -> str:
    """The least exact of these types; products of float32 that may be made coarser count so."""
    known = sorted(set(dtypes), key=lambda name: LIMITS.get(name, _COARSER))
    name = known[-1] if known else "float32"
    products = {fact.data.get("matmul", "highest") for fact in facts}
    on_a_device = any(fact.data.get("device", "cpu") != "cpu" for fact in facts)
    return "float16" if name == "float32" and products - {"highest"} and on_a_device else name


# ------------------------------------------------------------------------- two of them side by side


def compared(
    wanted: Gradient | None, found: Gradient | None, step: int, *, noise: float, later: bool
) -> Compared | None:
    """The gradients of one step of two runs; None where one of them was not told.

    `noise` is how far apart two runs of the source's own topology are at that step; `later`: a step
    lies between the equal state and these gradients.
    """
    if wanted is None or found is None:
        return None
    dtype = max(wanted.dtype, found.dtype, key=lambda name: LIMITS.get(name, _COARSER))
    limit = LIMITS.get(dtype, _COARSER)
    if later:
        limit = _LATER.get(dtype, _LATER_FACTOR * limit)
    limit = min(max(limit, noise), _MOST)
    apart = _drifting(wanted, found, limit)
    wanted, found = (_without_parts(each, apart) for each in (wanted, found))
    left, right, unknown = _common(wanted, found, limit)
    if not left and not (wanted.parts or found.parts):
        return None
    distance, ratio = relative_distance(left, right), _size_ratio(wanted, found, left, right)
    result = Compared(
        step,
        dtype,
        limit,
        distance if left else abs(ratio - 1.0),
        ratio,
        cosine(left, right) if left else 1.0,
        wanted.drawn or found.drawn,
        unknown=unknown,
    )
    described = _described(result, left, right, _parts_ratio(wanted, found), later=later)
    if not apart or described.told:
        return described
    told = (
        f"ranks drift apart in {_pattern(apart, [*left, *apart])}: each steps with its own gradient"
    )
    return replace(described, told=told, subjects=tuple(apart[:_SHOWN]))


def _drifting(wanted: Gradient, found: Gradient, limit: float) -> list[str]:
    """Replicas that are handed gradients of their own: their mean or sum is the whole gradient of
    the other run, and they drift apart. (Parts that began alike have no such whole.)
    """

    def one_of(forms: Sequence[Sequence[float]], whole: Sequence[float]) -> bool:
        return any(
            relative_distance({"": whole}, {"": form[:PROJECTIONS]}) <= limit * _OWN
            for form in forms
        )

    pairs = ((wanted, found), (found, wanted))
    return sorted(
        name
        for one, other in pairs
        for name in one.drifting.keys() & other.whole.keys()
        if one_of(one.drifting[name], other.whole[name])
    )


def _without_parts(of: Gradient, names: Sequence[str]) -> Gradient:
    """A gradient without what is no part after all."""
    return replace(
        of,
        parts={n: v for n, v in of.parts.items() if n not in names},
        whole={n: v for n, v in of.whole.items() if n not in names},
        squares={n: v for n, v in of.squares.items() if n not in names},
    )


def _common(
    wanted: Gradient, found: Gradient, limit: float
) -> tuple[dict[str, Sequence[float]], dict[str, Sequence[float]], tuple[str, ...]]:
    """What both have whole, by name; replicas that were handed different gradients count as their
    mean or their sum, whichever is the other run's, and are unknown where neither is.
    """
    left = {n: wanted.whole[n] for n in wanted.whole.keys() & found.whole.keys()}
    right = {n: found.whole[n] for n in left}
    unknown = []
    for name in sorted(wanted.uneven.keys() | found.uneven.keys()):
        mine, theirs = _forms(wanted, name), _forms(found, name)
        pairs = [(a, b) for a in mine for b in theirs]
        near = [(a, b) for a, b in pairs if relative_distance({"": a}, {"": b}) <= limit * _OWN]
        if near:
            left[name], right[name] = near[0]
        elif pairs:
            unknown.append(name)
    return dict(sorted(left.items())), dict(sorted(right.items())), tuple(unknown)


def _forms(of: Gradient, name: str) -> list[Sequence[float]]:
    if name in of.whole:
        return [of.whole[name]]
    return [form[:PROJECTIONS] for form in of.uneven.get(name, ())]


def _size_ratio(wanted: Gradient, found: Gradient, left: Vectors, right: Vectors) -> float:
    """Exact where every tensor is whole: the sums of squares tell it."""
    if left and all(n in wanted.squares and n in found.squares for n in left):
        sizes = [math.fsum(of.squares[n] for n in left) for of in (wanted, found)]
        return math.sqrt(sizes[1] / sizes[0]) if sizes[0] else (math.inf if sizes[1] else 1.0)
    return norm_ratio(left, right) if left else (_parts_ratio(wanted, found) or 1.0)


def _parts_ratio(wanted: Gradient, found: Gradient) -> float | None:
    """How much larger all that is held in parts is, in either run; None where that is not known."""
    names = wanted.parts.keys() | found.parts.keys()
    if not names:
        return None
    # Under local names (expert 0 of each rank) a part of one run is another's whole.
    others = {n for n in wanted.whole.keys() ^ found.whole.keys() if n not in names}
    sizes = []
    for of in (wanted, found):
        held = [of.parts.get(n, of.squares.get(n, 0.0)) for n in names | others]
        sizes.append(math.fsum(held))
    if not all(map(math.isfinite, sizes)) or not sizes[0]:
        return None
    return math.sqrt(sizes[1] / sizes[0])


def _described(
    about: Compared, left: Vectors, right: Vectors, of_parts: float | None, *, later: bool
) -> Compared:
    """The comparison with what the difference looks like, where there is one."""
    size_limit = max(about.limit, _SIZE_LIMITS.get(about.dtype, 0.0))
    if not later and about.dtype in _SIZE_LIMITS:
        size_limit = _SIZE_LIMITS[about.dtype]
    apart = _apart_names(about, left, right)
    parts_apart = of_parts is not None and abs(of_parts - 1.0) > 2.0 * about.limit
    whole_apart = about.distance > about.limit or abs(about.ratio - 1.0) > size_limit
    furthest = {
        n: [cosine(*_one(n, left, right)), norm_ratio(*_one(n, left, right))] for n in apart
    }
    if not (apart or parts_apart or whole_apart):
        return about
    told = _told(about, left, furthest, of_parts if parts_apart else None)
    names = tuple(list(furthest)[:_SHOWN])
    shown = {name: furthest[name] for name in names}
    return Compared(
        about.step,
        about.dtype,
        about.limit,
        about.distance,
        about.ratio,
        about.cosine,
        about.drawn,
        told,
        names,
        shown,
        about.unknown,
    )


def _one(name: str, left: Vectors, right: Vectors) -> tuple[Vectors, Vectors]:
    return {name: left[name]}, {name: right[name]}


def _apart_names(about: Compared, left: Vectors, right: Vectors) -> list[str]:
    """The parameters whose gradient is another one, the furthest of all first."""
    size = math.hypot(*(v for vector in left.values() for v in vector))
    gaps = {n: math.dist(left[n], right[n]) for n in left}
    own = {n: max(math.hypot(*left[n]), math.hypot(*right[n])) for n in left}
    names = [
        n
        for n, gap in gaps.items()
        if gap > _OWN * about.limit * own[n] and gap > _SHARE * about.limit * size
    ]
    return sorted(names, key=lambda n: (-gaps[n], n))


def _told(
    about: Compared,
    left: Vectors,
    furthest: Mapping[str, Sequence[float]],
    of_parts: float | None,
) -> str:
    """What the difference looks like, in words."""
    factors = {n: ratio for n, (angle, ratio) in furthest.items() if angle > 1.0 - 1e-3}
    one = statistics.median(factors.values()) if factors else about.ratio
    same = [n for n, f in factors.items() if abs(f - one) <= _TO_WHOLE_FACTOR * one]
    if len(same) == len(furthest) and about.cosine > 1.0 - 1e-4 and _nearly_all(furthest, left):
        return f"all gradients are {about.ratio:.4g} times as large{_guess(about.ratio)}"
    if furthest and not _nearly_all(furthest, left):
        where = _pattern(list(furthest), list(left))
        if len(same) == len(furthest):
            return f"only {where}: {one:.4g} times as large"
        return (
            f"only {where} {'differs' if len(furthest) == 1 else 'differ'}: "
            f"cosine {furthest[next(iter(furthest))][0]:.4g}, "
            f"{furthest[next(iter(furthest))][1]:.4g} times as large"
        )
    if of_parts is not None and about.distance <= about.limit:
        return (
            f"only what ranks hold in parts: together {of_parts:.4g} times as large"
            f"{_guess(of_parts)}"
        )
    if abs(about.ratio - 1.0) > about.limit and about.cosine > 1.0 - 1e-6:
        return f"all gradients are {about.ratio:.4g} times as large{_guess(about.ratio)}"
    first = next(iter(furthest), "")
    return (
        f"cosine {about.cosine:.6f}, {about.ratio:.4g} times as large"
        f"{f', furthest in {first}' if first else ''}"
    )


def _nearly_all(furthest: Mapping[str, object], left: Vectors) -> bool:
    """Whether what differs is all that has a gradient worth the name."""
    size = math.hypot(*(v for vector in left.values() for v in vector))
    rest = (v for name, vector in left.items() if name not in furthest for v in vector)
    return math.hypot(*rest) <= 1e-3 * size


def _guess(ratio: float) -> str:
    """A whole number is what a sum makes of a mean, anything else a norm or a count does."""
    for factor in (ratio, 1.0 / ratio if ratio else 0.0):
        if factor > 1.5 and abs(factor - round(factor)) < 0.003 * factor:
            sum_here = factor == ratio
            return f": a {'sum' if sum_here else 'mean'} where the source has a " + (
                "mean" if sum_here else "sum"
            )
    return ": another clipping, or another normalisation of the loss"


def _pattern(names: Sequence[str], of_all: Sequence[str]) -> str:
    """A name or a glob for some of the names: the longest beginning or end that only they have."""
    if len(names) == 1:
        return names[0]
    rest = [name for name in of_all if name not in names]
    start = _shared([name.split(".") for name in names])
    if start and not any(name.startswith(f"{start}.") for name in rest):
        return f"{start}.*"
    end = _shared([name.split(".")[::-1] for name in names], reverse=True)
    if end and not any(name.endswith(f".{end}") for name in rest):
        return f"*.{end}"
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _shared(split: Sequence[Sequence[str]], *, reverse: bool = False) -> str:
    """The parts that all begin with, as a name."""
    columns = itertools.takewhile(lambda c: len(set(c)) == 1, zip(*split, strict=False))
    parts = [column[0] for column in columns]
    return ".".join(reversed(parts) if reverse else parts)


def asks_for_quiet(reference: Trajectory, restored: Trajectory, step: int) -> bool:
    """Whether the gradients of a step differ, be it for random layers: then two restores that have
    none tell whether that is all, and where a difference begins.
    """
    beside = compared(
        gradient(reference, step), gradient(restored, step), step, noise=0.0, later=False
    )
    return beside is not None and beside.told is not None


# ------------------------------------------------------------------------ where a difference begins


def begins_in(source: Trajectory, target: Trajectory, dtype: str) -> str | None:
    """Where two restores without random layers part in their first step, in words."""
    here, there = _outputs(source), _outputs(target)
    names = [name for name in here if name in there and here[name][0] == there[name][0]]
    if not names:
        return None
    limit = LIMITS.get(dtype, _COARSER)
    first = next((n for n in names if _row_distance(here[n], there[n]) > limit), None)
    if first is not None:
        return f"it begins in the forward of {first}"
    return f"the outputs of {len(names)} layers are equal: the loss, or the way back, begins it"


def _outputs(run: Trajectory) -> Mapping[str, tuple[int, Sequence[float]]]:
    """Layer -> the features of a row, and the mean over all rows of its projections and square."""
    sums: dict[str, list[tuple[int, int, Sequence[float]]]] = {}
    for fact in run.record.of("outputs"):
        for name, (features, rows, numbers) in fact.data["layers"].items():
            sums.setdefault(name, []).append((features, rows, numbers))
    found = {}
    for name, held in sums.items():
        rows = sum(each[1] for each in held)
        if rows and len({each[0] for each in held}) == 1:
            columns = zip(*(each[2] for each in held), strict=True)
            found[name] = (held[0][0], [math.fsum(column) / rows for column in columns])
    return found


def _row_distance(one: tuple[int, Sequence[float]], other: tuple[int, Sequence[float]]) -> float:
    """How far the mean rows are apart, as a part of the size of a row."""
    *wanted, square = one[1]
    *found, other_square = other[1]
    # The mean of eight ±1 projections' squares is the square of the row.
    size = math.sqrt(max(square, other_square, 0.0) * len(wanted)) or 1.0
    sizes = abs(math.sqrt(max(other_square, 0.0)) - math.sqrt(max(square, 0.0)))
    return max(math.dist(wanted, found) / size, sizes / (math.sqrt(max(square, 0.0)) or 1.0))


# ------------------------------------------------------------------------- what two runs begin with


def begins_alike(one: Trajectory, other: Trajectory, step: int) -> bool:
    """Whether both hold the same weights and buffers when they have completed `step`, whole or in
    parts that fit together.
    """
    first, second = one.sample("state", step), other.sample("state", step)
    return all(_alike(first, second, part) for part in ("weights", "buffers")) and bool(first)


def _alike(one: Sequence[Fact], other: Sequence[Fact], part: str) -> bool:
    left, right = combine(one, part), combine(other, part)
    differing = {
        name
        for name in left.keys() | right.keys()
        if name not in left
        or name not in right
        or left[name].content != right[name].content
        or left[name].by_rank
        or right[name].by_rank
    }
    if part == "weights" and not (left and right):
        return False
    return differing <= parts.fit(one, other, part, differing).right
