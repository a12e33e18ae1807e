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

from ckptdrill.judge.allowed import Allowed
from ckptdrill.judge.trajectory import LossForm, Pair, Trajectory
from ckptdrill.model import Check, Held, Item, Tolerance

# Sums of a different order differ by a few units in the last place even where nothing else does:
# the smallest band is 16 ulp of float32, the type losses are computed in.
FLOOR = 16 * 2.0**-24
# Losses of equal state and samples that are put together in the right way agree to this.
_AGREES = 1e-4


def window(pair: Pair, tolerance: Tolerance, allowed: Allowed) -> Check:
    """Loss of the restored run over the reference, step by step.

    Without a planned run that the band should have come from, a loss beyond rounding says nothing
    about the restore.
    """
    steps = pair.compared
    form = _form(pair, allowed.control)
    reference = [pair.reference_loss(s, form) for s in steps]
    restored = [pair.restored.loss(s, form) for s in steps]
    refs = pair.reference.refs(steps) + pair.restored.refs(steps)
    if pair.lost_steps or not steps or None in reference or None in restored:
        what = pair.lost_steps or "no scalar was passed to backward in every step"
        return Check(Item.LOSS, Held.NOT_OBSERVED, what, facts=refs)
    deviations = [deviation(a, b) for a, b in zip(reference, restored, strict=True)]
    band, source = _band(pair, steps, tolerance, allowed, form)
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
        None if measured_by_owner else allowed.noisy,
        None if measured_by_owner else allowed.unmeasured,
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


def largest_deviation(
    reference: Trajectory,
    other: Trajectory,
    steps: Iterable[int],
    form: LossForm = LossForm.MEAN,
) -> float:
    """The largest deviation over the steps both runs have; 0 when there is none."""
    both = [s for s in steps if s in reference.stepped and s in other.stepped]
    losses = ((reference.loss(s, form), other.loss(s, form)) for s in both)
    return max((deviation(one, another) for one, another in losses), default=0.0)


def _form(pair: Pair, control: Trajectory | None) -> LossForm:
    """How the ranks' losses make that of the job: the way in which two runs agree that go on from
    equal state. A job may sum what each rank passes to backward, or its last stage alone has one.
    """
    if control is None or not pair.compared:
        return LossForm.MEAN
    first = pair.compared[0]

    def apart(form: LossForm) -> float:
        gaps = [deviation(pair.reference.loss(first, form), pair.restored.loss(first, form))]
        begin = pair.reference.offset + 1
        if begin in control.stepped and begin in pair.reference.stepped:
            gaps.append(deviation(pair.reference.loss(begin, form), control.loss(begin, form)))
        return min(gaps)

    return next((form for form in LossForm if apart(form) <= _AGREES), LossForm.MEAN)


def _band(
    pair: Pair, steps: Sequence[int], tolerance: Tolerance, allowed: Allowed, form: LossForm
) -> tuple[float, str]:
    if tolerance.loss is not None:
        return tolerance.loss, "set by the owner"
    repeats, control, safety = allowed.repeats, allowed.control, allowed.safety
    variance = max((largest_deviation(pair.reference, r, steps) for r in repeats), default=0.0)
    topology = largest_deviation(pair.reference, control, steps, form) if control else 0.0
    ceiling = allowed.loss_ceiling
    band = max(safety * variance, min(safety * topology, ceiling), FLOOR)
    source = f"{safety:g} x the larger of run-to-run {variance:.2g}"
    if control:
        source += f" and uninterrupted at the target {topology:.2g}"
        if safety * topology > ceiling:
            source += f", of which no more than {ceiling:.2g} is let pass"
    return band, f"{source}; at least {FLOOR:.2g}"
