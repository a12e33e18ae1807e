"""Whether the target topology itself trains otherwise, which no checkpoint is to blame for.

A job whose gradients are added up where they should be averaged restores bit by bit and goes on as
another training at twice the ranks. Its uninterrupted run at the target does the same, so that run
is a suspect here and never an excuse. In order: `observed` lays the gradients of the first steps
after the restore beside the reference's, and those of the first steps of source and control beside
each other, which begin alike; `row` makes one row of that; `cause` says whether the uninterrupted
run leaves the source's training, too: then the topology does it, and not what the restore lost.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptdrill.judge import data, gradients, loss, updates
from ckptdrill.judge.gradients import Compared, Gradient
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Check, Fact, Held, Item, JsonValue, Topology

# The names under which a matrix approves of what a topology changes (`policy.approved`).
GRADIENTS, RATES = "topology.gradients", "topology.rates"
# Where gradients are equal to rounding, what an uninterrupted run at the target may excuse: losses
# drift apart by less over a window, and updates differ by less, in healthy jobs.
_LOSS_CEILINGS = {"float64": 1e-3, "float32": 1e-2, "float16": 3e-2, "bfloat16": 5e-2}
_UPDATE_CEILINGS = {"float64": 1e-2, "float32": 5e-2, "float16": 0.2, "bfloat16": 0.3}
_ANY_CEILING = 0.3
# Beside the gradient of all elements together, one that is smaller than this is rounding alone.
_ROUNDING = {"float64": 1e-9, "float32": 1e-4}
_OTHER_ROUNDING = 1e-2
_STEPS = 3  # as many as ckptdrill/step.py has recorded


@dataclass(frozen=True)
class Observed:
    """The gradients of the first steps, side by side.

    `after` are those of the reference and the restored run, `start` those of source and control
    from the weights that both began with. `quiet` are those of two restores in which random layers
    were silenced, where such were made. `why_none` says which of `after` is missing.
    """

    after: tuple[Compared, ...] = ()
    start: tuple[Compared, ...] = ()
    quiet: tuple[Compared, ...] = ()
    why_none: str = ""
    begins_alike: bool = False
    begins_in: str = ""  # where the quiet pair parts, in words
    facts: tuple[str, ...] = ()

    @property
    def drawn(self) -> bool:
        """Whether random numbers are drawn in these steps, on either side."""
        return any(each.drawn for each in (*self.after, *self.start))

    @property
    def same(self) -> bool:
        """The first gradients after the restore are the reference's, as far as rounding goes: where
        random layers hide it, those of the quiet pair.
        """
        told = [each for each in self.after if each.told]
        if told and self.quiet and all(each.drawn for each in told):
            return all(each.told is None for each in self.quiet)
        return bool(self.after) and not told

    @property
    def differ(self) -> bool:
        """Some gradient of equal state and samples differs, and no random layer explains it."""
        seen = (*self.after, *self.start, *self.quiet)
        return any(each.told and not each.drawn for each in seen)

    @property
    def dtype(self) -> str:
        """The coarsest type of number on the way."""
        kinds = [each.dtype for each in self.after]
        limits = gradients.LIMITS
        return max(kinds, key=lambda kind: limits.get(kind, 1.0), default="float32")

    @property
    def loss_ceiling(self) -> float:
        """What an uninterrupted run at the target may excuse of the loss; random layers, all."""
        return self._ceiling(_LOSS_CEILINGS)

    @property
    def update_ceiling(self) -> float:
        """The same of the first update."""
        return self._ceiling(_UPDATE_CEILINGS)

    def _ceiling(self, ceilings: Mapping[str, float]) -> float:
        if not self.after or self.drawn:
            return math.inf
        return ceilings.get(self.dtype, _ANY_CEILING)


def observed(
    pair: Pair,
    control: Trajectory,
    alike: Sequence[Trajectory],
    quiet: Sequence[Trajectory],
    topologies: tuple[Topology, Topology],
    safety: float,
) -> Observed:
    """What is known of the first gradients. `alike` are further runs at the source's topology,
    repeats and its own restore: how far the first gradients of those are from the reference's,
    times `safety`, no other topology is accused of. `quiet` are two restores without random
    layers, at the source's topology and at the target's, or nothing.
    """
    noise = safety * _noise(pair, alike)
    steps = list(pair.compared[:_STEPS])
    lacking = next((text for s in steps for text in _lacking(pair, s)), "")
    after = [
        compared
        for s in steps
        if (
            compared := gradients.compared(
                gradients.gradient(pair.reference, s),
                gradients.gradient(pair.restored, s),
                s,
                noise=noise,
                later=s > steps[0],
            )
        )
    ]
    begins = gradients.begins_alike(pair.reference, control, pair.reference.offset)
    start = _from_the_start(pair, control, topologies, noise) if begins else ()
    refs = tuple(
        ref
        for run in (pair.reference, pair.restored)
        for ref in run.record.refs(_facts(run, steps))
    )
    without = _quiet(quiet, pair, noise)
    seen = Observed(tuple(after), start, without, lacking, begins, facts=refs)
    if len(quiet) != 2:
        return seen
    here, there = quiet
    return replace(seen, begins_in=gradients.begins_in(here, there, seen.dtype) or "")


def _facts(run: Trajectory, steps: Sequence[int]) -> list[Fact]:
    found = [gradients.gradient(run, step) for step in steps]
    return [fact for each in found if each is not None for fact in each.facts[:1]]


def _lacking(pair: Pair, step: int) -> list[str]:
    """A step that a loss scaler skips is none of which an optimizer is handed a gradient."""
    return [
        f"{run.record.launch_id} recorded no gradient of step {step} on every rank"
        for run in (pair.reference, pair.restored)
        if gradients.gradient(run, step) is None
        and not any(fact.data.get("skipped") for fact in run.stepped.get(step, ()))
    ]


def _noise(pair: Pair, alike: Sequence[Trajectory]) -> float:
    """How far apart the first gradients of runs of one topology are that begin with equal state.

    Where random numbers are drawn those of another stream are no rounding: no more than the limit.
    """
    found = [0.0]
    for run in alike:
        step = run.offset + 1
        one, other = (gradients.gradient(each, step) for each in (pair.reference, run))
        beside = gradients.compared(one, other, step, noise=0.0, later=False)
        if beside is not None and math.isfinite(beside.distance):
            most = beside.limit if beside.drawn else beside.distance
            found.append(min(beside.distance, most))
    return max(found)


def _from_the_start(
    pair: Pair, control: Trajectory, topologies: tuple[Topology, Topology], noise: float
) -> tuple[Compared, ...]:
    """Source and control from equal weights, as long as both consume the same samples."""
    found = []
    source, first = pair.reference, pair.reference.offset + 1
    for step in range(first, first + _STEPS):
        if source.lost(source.batches, [step]) or control.lost(control.batches, [step]):
            break
        same = data.same_samples((source, topologies[0]), (control, topologies[1]), step)
        one, other = gradients.gradient(source, step), gradients.gradient(control, step)
        beside = gradients.compared(one, other, step, noise=noise, later=step > first)
        # Rows in another form are the same samples where what follows from them is the same.
        if beside is None or not (same or beside.distance <= beside.limit):
            break
        found.append(beside)
    return tuple(found)


def _quiet(runs: Sequence[Trajectory], pair: Pair, noise: float) -> tuple[Compared, ...]:
    if len(runs) != 2:
        return ()
    step = pair.restore_step + 1
    one, other = (gradients.gradient(run, step) for run in runs)
    beside = gradients.compared(one, other, step, noise=noise, later=False)
    return (beside,) if beside is not None else ()


# ------------------------------------------------------------------------------------------ the row


def row(seen: Observed, samples: Held, approved: Mapping[str, str]) -> Check:
    """The row of the first gradients. `samples` is what the row of the data order says."""
    check = _row(seen, samples)
    why = next((why for glob, why in approved.items() if fnmatch.fnmatch(GRADIENTS, glob)), None)
    if check.status is not Held.BROKEN or why is None:
        return check
    told = f"approved ({GRADIENTS}): {why} (found: {check.summary})"
    numbers = {**check.numbers, "declared_broken": True}
    return Check(
        check.item, Held.OUT_OF_SCOPE, told, check.subjects, facts=check.facts, numbers=numbers
    )


def _row(seen: Observed, samples: Held) -> Check:
    if seen.why_none or not seen.after:
        why = seen.why_none or "no gradient of both runs could be compared"
        return _made(seen, Held.NOT_OBSERVED, why, move=_WHERE_IT_IS)
    told = next((each for each in seen.after if each.told), None)
    started = next((each for each in seen.start if each.told and not each.drawn), None)
    if started is not None and (told is None or samples is Held.NOT_OBSERVED):
        what = (
            f"from equal weights and samples an uninterrupted run at the target has another "
            f"gradient at step {started.step}: {started.told}"
        )
        return _made(seen, Held.BROKEN, what, started)
    if told is None:
        return _same(seen)
    if samples is Held.NOT_OBSERVED:
        what = (
            f"another gradient at step {told.step} ({told.told}), but whether from the same "
            "samples is not known"
        )
        move = "settle the row of the data order first"
        return _made(seen, Held.NOT_OBSERVED, what, told, move)
    if told.drawn:
        return _behind_noise(seen, told)
    what = f"the gradient of step {told.step} differs: {told.told}"
    return _made(seen, Held.BROKEN, what, told)


def _made(
    seen: Observed, status: Held, summary: str, about: Compared | None = None, move: str = ""
) -> Check:
    return Check(
        Item.GRADIENTS,
        status,
        summary,
        about.subjects if about else (),
        facts=seen.facts,
        numbers=_numbers(seen, about),
        next_move=move,
    )


def _same(seen: Observed) -> Check:
    first = seen.after[0]
    if first.unknown:
        names = ", ".join(first.unknown[:3])
        what = f"ranks were handed different gradients of {names}: neither mean nor sum is known"
        return _made(seen, Held.NOT_OBSERVED, what, first, _WHERE_IT_IS)
    steps = " to ".join(str(each.step) for each in (first, seen.after[-1])[: len(seen.after)])
    worst = max(seen.after, key=lambda each: each.distance / each.limit)
    return _made(
        seen,
        Held.HELD,
        f"the gradients of step{'s' if len(seen.after) > 1 else ''} {steps} are the reference's: "
        f"distance {worst.distance:.2g}, limit {worst.limit:.2g} ({first.dtype})",
        first,
    )


def _behind_noise(seen: Observed, told: Compared) -> Check:
    """Random layers make the gradients of the two runs different; the quiet pair decides."""
    if not seen.quiet:
        return _made(
            seen,
            Held.NOT_OBSERVED,
            f"random numbers are drawn in step {told.step}, and no pair of restores without them "
            "was made: whether the gradient is the same is hidden",
            told,
            "run the cell again, or turn dropout off in job.args",
        )
    (quiet,) = seen.quiet
    if quiet.drawn and quiet.told:
        return _made(
            seen,
            Held.NOT_OBSERVED,
            f"random numbers are drawn in step {told.step} by more than random layers of torch, "
            "which were silenced: whether the gradient is the same is hidden",
            quiet,
            "turn what draws off in job.args for the drill",
        )
    if quiet.told:
        what = f"with random layers silenced in both, the gradient of step {quiet.step} differs"
        return _made(seen, Held.BROKEN, f"{what}: {quiet.told}", quiet)
    return _made(
        seen,
        Held.HELD,
        f"with random layers silenced in both, the gradient of step {quiet.step} is the "
        f"reference's: distance {quiet.distance:.2g}, limit {quiet.limit:.2g} ({quiet.dtype})",
        quiet,
    )


def _numbers(seen: Observed, about: Compared | None) -> dict[str, JsonValue]:
    if about is None:
        return {}
    return {
        **about.numbers,
        "distances": {str(each.step): each.distance for each in seen.after},
        "from_the_start": {str(each.step): each.distance for each in seen.start},
        "quiet": bool(seen.quiet),
    }


_WHERE_IT_IS = (
    "let the optimizer find the gradient in `.grad` when it steps, or declare the item out of scope"
)


def negligible(pair: Pair, seen: Observed) -> frozenset[str]:
    """Parameters whose gradient is rounding and nothing else (a bias before a normalisation): Adam
    makes updates of it that no two runs have in common.
    """
    step = pair.restore_step + 1
    both = [gradients.gradient(run, step) for run in (pair.reference, pair.restored)]
    if any(each is None for each in both):
        return frozenset()
    least = _ROUNDING.get(seen.dtype, _OTHER_ROUNDING)
    found = [_small(each, least) for each in both if each is not None]
    return found[0] | found[1]


def _small(of: Gradient, least: float) -> frozenset[str]:
    size = math.sqrt(math.fsum(of.squares.values()))
    return frozenset(n for n, square in of.squares.items() if math.sqrt(square) <= least * size)


# ---------------------------------------------------------------------------------------- the cause


@dataclass(frozen=True)
class Cause:
    """What the topology itself does, in words; `of_rates`: to rates and other hyper-parameters."""

    text: str
    of_rates: bool = False


def cause(
    seen: Observed,
    pair: Pair,
    control: Trajectory,
    checks: Sequence[Check],
    approved: Mapping[str, str],
) -> Cause | None:
    """What the topology itself does; None where an uninterrupted run at the target goes on as the
    source does, so that what differs was lost.
    """
    rates = _rates(pair, control, checks)
    if rates and not any(fnmatch.fnmatch(RATES, glob) for glob in approved):
        return Cause(rates, of_rates=True)
    text = _of_gradients(seen, pair, control, checks)
    where = f"; {seen.begins_in}" if seen.begins_in and seen.differ else ""
    return Cause(text + where) if text else None


def _of_gradients(
    seen: Observed, pair: Pair, control: Trajectory, checks: Sequence[Check]
) -> str | None:
    row = next((c for c in checks if c.item is Item.GRADIENTS), None)
    found = row.summary if row is not None and row.status is Held.BROKEN else None
    started = next((each for each in seen.start if each.told and not each.drawn), None)
    if started is not None:
        return f"{started.told}, from the first step of an uninterrupted run there on"
    # A run that began with other weights, or noise in both, cannot clear the topology.
    if seen.drawn or (found and not (seen.begins_alike and seen.start)):
        return found
    drift = _drift(seen, pair, control)
    if drift is None or found is None:
        return drift
    return f"{found} ({drift})"


def _drift(seen: Observed, pair: Pair, control: Trajectory) -> str | None:
    """How an uninterrupted run at the target leaves the source's training that it began alike."""
    if not seen.begins_alike or not pair.compared:
        return None
    first = pair.reference.offset + 1
    one, other = updates.update(pair.reference, first), updates.update(control, first)
    names = one.keys() & other.keys()
    if names and seen.start and seen.update_ceiling < math.inf:
        size = gradients.gradient(pair.reference, first)
        names -= _small(size, _ROUNDING.get(seen.dtype, _OTHER_ROUNDING)) if size else frozenset()
        left, right = ({n: of[n] for n in sorted(names)} for of in (one, other))
        distance = updates.relative_distance(left, right) if names else 0.0
        if distance > seen.update_ceiling and math.isfinite(distance):
            return (
                "equal gradients lead to other updates: an uninterrupted run there departs with "
                f"its first one (cosine {updates.cosine(left, right):.4f}, "
                f"{updates.norm_ratio(left, right):.4g} times as large): the optimizer begins it"
            )
    for step in range(first, min(pair.compared[-1], control.last_step) + 1):
        gap = loss.deviation(pair.reference.loss(step), control.loss(step))
        if gap > seen.loss_ceiling:
            return f"the loss of an uninterrupted run there is {gap:.2g} off at step {step}"
    return None


def _rates(pair: Pair, control: Trajectory, checks: Sequence[Check]) -> str | None:
    """Rates and other hyper-parameters that the restored run shares with the control and not with
    the reference.
    """
    broken = {c.item for c in checks if c.status is Held.BROKEN}
    if not broken & {Item.HYPERPARAMETERS, Item.SCHEDULER} or not pair.compared:
        return None
    step = pair.compared[0]
    wanted, found, there = (
        run.learning_rates(step).get(0, ()) for run in (pair.reference, pair.restored, control)
    )
    if wanted and found == there and len(found) == len(wanted) and found != wanted:
        at = next(n for n, rate in enumerate(found) if rate != wanted[n])
        return (
            f"the rate is {found[at]:g} there and {wanted[at]:g} at the source: it changes with "
            "the ranks"
        )
    return _other_values(pair, control) if Item.HYPERPARAMETERS in broken else None


def _other_values(pair: Pair, control: Trajectory) -> str | None:
    """The first value of a parameter group that is the topology's own, in words."""
    runs = (pair.reference, pair.restored, control)
    held = [_values(run, pair.restore_step) for run in runs]
    wanted, found, there = held
    for key in wanted.keys() & found.keys():
        if found[key] == there.get(key) != wanted[key]:
            group, name = key
            return (
                f"{name} of group {group} is {found[key]} there and {wanted[key]} at the source: "
                "it changes with the ranks"
            )
    return None


def _values(run: Trajectory, step: int) -> dict[tuple[int, str], JsonValue]:
    """(group, name) -> value of what the first rank's optimizers are given, but for the rate."""
    facts = run.sample("state", step)
    groups = [group for each in (facts[0].data["groups"] if facts else ()) for group in each]
    return {
        (number, name): value
        for number, group in enumerate(groups)
        for name, value in group["hyper"].items()
        if name not in ("lr", "initial_lr")
    }
