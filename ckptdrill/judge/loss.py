"""Judge the loss window last, against a band that was measured in this run or set by the owner.

The band is the largest deviation that is *not* due to a restore: that of the repeats of the source,
and of the uninterrupted control at the target topology, times a safety factor. First loss proves
nothing by itself; a window inside the band is the last link of the chain, never the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Check, Held, Item, Tolerance

# Sums of a different order differ by a few units in the last place even where nothing else does:
# the smallest band is 16 ulp of float32, the type losses are computed in.
FLOOR = 16 * 2.0**-24


def window(
    pair: Pair,
    repeats: Sequence[Trajectory],
    control: Trajectory | None,
    tolerance: Tolerance,
    noisy: str | None,
    unmeasured: str | None = None,
) -> Check:
    """Loss of the restored run over the reference, step by step.

    `unmeasured` says which planned run the band should have come from and did not: without it a
    loss beyond rounding says nothing about the restore.
    """
    steps = pair.compared
    reference = [pair.reference.loss(s) for s in steps]
    restored = [pair.restored.loss(s) for s in steps]
    refs = pair.reference.refs(steps) + pair.restored.refs(steps)
    if pair.lost_steps or not steps or None in reference or None in restored:
        what = pair.lost_steps or "no scalar was passed to backward in every step"
        return Check(Item.LOSS, Held.NOT_OBSERVED, what, facts=refs)
    deviations = [deviation(a, b) for a, b in zip(reference, restored, strict=True)]
    band, source = _band(pair, steps, repeats, control, tolerance)
    numbers = {
        "steps": list(steps),
        "reference": reference,
        "restored": restored,
        "deviation": deviations,
        "band": band,
        "band_from": source,
    }
    measured_by_owner = tolerance.loss is not None
    check = _judged(
        numbers,
        None if measured_by_owner else noisy,
        None if measured_by_owner else unmeasured,
    )
    return replace(check, facts=refs, numbers=numbers)


def _judged(numbers: Mapping[str, Any], noisy: str | None, unmeasured: str | None) -> Check:
    """The row for these deviations, without its facts and numbers."""
    band, source, deviations = numbers["band"], numbers["band_from"], numbers["deviation"]
    worst = max(deviations)
    if noisy:
        return Check(
            Item.LOSS,
            Held.NOT_OBSERVED,
            f"the reference does not reproduce itself: {noisy}",
            next_move="seed the job, or set tolerance.loss",
        )
    if worst <= band:
        summary = f"largest deviation {worst:.2g}, inside the band of {band:.2g} ({source})"
        return Check(Item.LOSS, Held.HELD, summary)
    if unmeasured:
        return Check(
            Item.LOSS,
            Held.NOT_OBSERVED,
            f"deviates by {worst:.2g}, and how far it may is not known: {unmeasured}",
            next_move="see why that launch ended early, then continue the run with --resume",
        )
    first = numbers["steps"][next(i for i, d in enumerate(deviations) if d > band)]
    return Check(
        Item.LOSS,
        Held.BROKEN,
        f"deviates by {worst:.2g} (first outside at step {first}), the band "
        f"is {band:.2g} ({source})",
        ("loss",),
    )


def deviation(reference: float | None, other: float | None) -> float:
    """|a - b| / |a|; infinite when either is missing or not a number."""
    if (
        reference is None
        or other is None
        or not (math.isfinite(reference) and math.isfinite(other))
    ):
        return 0.0 if reference == other and reference is not None else math.inf
    return abs(reference - other) / max(abs(reference), 1e-300)


def largest_deviation(reference: Trajectory, other: Trajectory, steps: Iterable[int]) -> float:
    """The largest deviation over the steps both runs have; 0 when there is none."""
    both = [s for s in steps if s in reference.stepped and s in other.stepped]
    return max((deviation(reference.loss(s), other.loss(s)) for s in both), default=0.0)


def _band(
    pair: Pair,
    steps: Sequence[int],
    repeats: Sequence[Trajectory],
    control: Trajectory | None,
    tolerance: Tolerance,
) -> tuple[float, str]:
    if tolerance.loss is not None:
        return tolerance.loss, "set by the owner"
    variance = max((largest_deviation(pair.reference, r, steps) for r in repeats), default=0.0)
    topology = largest_deviation(pair.reference, control, steps) if control else 0.0
    band = max(tolerance.safety * max(variance, topology), FLOOR)
    source = f"{tolerance.safety:g} x the larger of run-to-run {variance:.2g}"
    if control:
        source += f" and uninterrupted at the target {topology:.2g}"
    return band, f"{source}; at least {FLOOR:.2g}"
