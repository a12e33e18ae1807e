"""Judge where the job believes it is: completed step, and the learning-rate schedule.

A wrong step counter leaves every tensor intact, so it is looked for where a loop keeps it: whole
numbers in the user's own frames that grow by one per training step. A schedule is judged by its own
state and by the LR that was really used over at least two steps, because a schedule that drives the
wrong optimizer, or was built with another horizon, restores perfectly.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from ckptdrill.judge import ends
from ckptdrill.judge import state as states
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Check, Held, Item, JsonValue

# Schedules are float64 arithmetic; recomputing one in another order moves it by a few ulp.
LR_TOLERANCE = 1e-9
MIN_LR_STEPS = 2
Rates = tuple[JsonValue, ...]
_STEP_NAME = re.compile(
    r"(^|[._\[])(global_?step|completed_?steps?|steps?|iter(ation)?s?|iter_num|it)\]?$",
    re.IGNORECASE,
)
_EPOCH_NAME = re.compile(r"(^|[._\[])\w*(epoch|round)\w*\]?$", re.IGNORECASE)


def step(pair: Pair, control: Trajectory | None = None) -> Check:
    """The job's own step counter must stand where the reference's stood, and training must end
    where the reference's ends.
    """
    counted = _counter(pair)
    if counted.status is Held.BROKEN:
        return counted
    return ends.ended_otherwise(pair, control) or counted


def _counter(pair: Pair) -> Check:
    steps = pair.compared
    if not steps:
        return Check(Item.STEP, Held.NOT_OBSERVED, "the restored run completed no step to compare")
    if pair.lost_steps:
        return Check(Item.STEP, Held.NOT_OBSERVED, pair.lost_steps)
    refs = pair.reference.refs(steps[:1]) + pair.restored.refs(steps[:1])
    reference, restored = _counters(pair.reference, steps), _counters(pair.restored, steps)
    both = {name: values for name, values in reference.items() if name in restored}
    named = _steps_among([name for name, values in both.items() if _counts(values)])
    # A job may count iterations, some of which take no step or several, or rounds within epochs.
    named = named or [n for n, values in both.items() if _rises(values) and _STEP_NAME.search(n)]
    if not named and (place := _place(both, restored)):
        return Check(Item.STEP, Held.HELD, f"{place} as in the reference", facts=refs)
    if not named:
        return Check(
            Item.STEP,
            Held.NOT_OBSERVED,
            "no step counter was found in the job's own frames, nor in a library's loop",
            facts=refs,
            next_move="keep the step in a local variable or attribute of the loop, "
            "or declare the item out of scope",
        )
    wrong = [name for name in named if reference[name] != restored[name]]
    if len(wrong) < len(named):
        right = next(name for name in named if name not in wrong)
        return Check(
            Item.STEP,
            Held.HELD,
            f"step {pair.restore_step + 1} follows step {pair.restore_step} (`{right}`)",
            facts=refs,
        )
    return _wrong_step(pair, wrong, reference, restored, refs)


def _steps_among(counting: Sequence[str]) -> Sequence[str]:
    """What counts in the job's own code and is named a step; else what a library's loop counts
    (`library:`); else anything that counts.
    """
    own = [name for name in counting if ":" not in name]
    named = [name for name in own if _STEP_NAME.search(name)]
    return named or [name for name in counting if name not in own] or own


def _wrong_step(
    pair: Pair,
    wrong: Sequence[str],
    reference: Mapping[str, list[int]],
    restored: Mapping[str, list[int]],
    refs: tuple[str, ...],
) -> Check:
    name = wrong[0]
    gap = restored[name][0] - reference[name][0]
    if gap == -pair.restore_step:
        what = "the job counts from the beginning again"
    else:
        what = f"the job continues from step {pair.restore_step + gap}, not {pair.restore_step}"
    detail = (
        f"`{name}` is {restored[name][0]}, the reference has {reference[name][0]} at the same point"
    )
    return Check(
        Item.STEP,
        Held.BROKEN,
        what,
        subjects=tuple(wrong),
        details=(detail,),
        facts=refs,
        numbers={"gap": gap},
    )


def _counters(run: Trajectory, steps: Sequence[int]) -> dict[str, list[int]]:
    """Counter name -> its value at each step, for the counters seen at every step on rank 0."""
    seen: dict[str, list[int]] = {}
    for number in steps:
        facts = run.stepped.get(number, ())
        first = next((f for f in facts if f.rank == min(g.rank for g in facts)), None)
        for name, value in (first.data.get("counters", {}) if first else {}).items():
            seen.setdefault(name, []).append(value)
    return {name: values for name, values in seen.items() if len(values) == len(steps)}


def _counts(values: Sequence[int]) -> bool:
    return len(values) >= MIN_LR_STEPS and all(b - a == 1 for a, b in itertools.pairwise(values))


def _rises(values: Sequence[int]) -> bool:
    return len(values) >= MIN_LR_STEPS and all(b > a for a, b in itertools.pairwise(values))


def _place(reference: Mapping[str, list[int]], restored: Mapping[str, list[int]]) -> str:
    """The counters that tell together where the loop is (the epoch, and the batch in it), if all
    of them are the reference's at every step.
    """
    moving = [name for name, values in reference.items() if len(set(values)) > 1]
    epochs = [name for name in moving if _EPOCH_NAME.search(name)]
    inside = [name for name in moving if name not in epochs]
    if not epochs or any(reference[n] != restored[n] for n in moving):
        return ""
    return " and ".join(f"`{name}`" for name in (*epochs[:1], *inside[:1]))


def schedule(pair: Pair, state: states.Sampled) -> Check:
    """Scheduler state at the restore, and the LR as used at each compared step."""
    steps = pair.compared
    if len(steps) < MIN_LR_STEPS:
        return Check(
            Item.SCHEDULER, Held.NOT_OBSERVED, f"{len(steps)} steps compared; the LR needs two"
        )
    unseen = pair.lost_steps or state.missing
    if unseen:
        return Check(Item.SCHEDULER, Held.NOT_OBSERVED, unseen)
    reference = [pair.reference.learning_rates(s) for s in steps]
    restored = [pair.restored.learning_rates(s) for s in steps]
    numbers = {
        "steps": list(steps),
        "reference": [list(r[min(r)]) for r in reference],
        "restored": [list(r[min(r)]) for r in restored],
        "tolerance": LR_TOLERANCE,
    }
    refs = pair.reference.refs(steps) + pair.restored.refs(steps) + state.refs
    lost = states.scheduler_state(state)
    wrong = [
        (step, *other)
        for step, a, b in zip(steps, reference, restored, strict=True)
        if (other := _other_rate(a, b))
    ]
    if not lost and not wrong:
        return Check(
            Item.SCHEDULER,
            Held.HELD,
            f"state equal; LR equal over {len(steps)} steps",
            facts=refs,
            numbers=numbers,
        )
    details = [*lost]
    if wrong:
        step, rank, wanted, used = wrong[0]
        details.append(
            f"LR of step {step} is {_shown(used)}, the reference has {_shown(wanted)}"
            + (f" (rank {rank})" if rank else "")
        )
    subjects = ("scheduler",) if lost else ("lr",)
    summary = details[0] if lost else f"state equal, but {details[0]}"
    return Check(Item.SCHEDULER, Held.BROKEN, summary, subjects, tuple(details[:8]), refs, numbers)


def _other_rate(
    reference: Mapping[int, Rates], restored: Mapping[int, Rates]
) -> tuple[int, Rates, Rates] | None:
    """The first rank whose LR is not the reference's, with what it should use and what it uses.

    Rank by rank where the ranks are the same; else every rank needs one of the reference that
    agrees with it.
    """
    if reference == restored:
        return None
    same = set(reference) == set(restored)
    for rank, used in sorted(restored.items()):
        candidates = [reference[rank]] if same else [*dict.fromkeys(reference.values())]
        if not any(_close(wanted, used) for wanted in candidates):
            return rank, candidates[0], used
    return None


def _close(a: Sequence[JsonValue], b: Sequence[JsonValue]) -> bool:
    if a == b:  # nearly always, and asked for every rank and step
        return True
    return len(a) == len(b) and all(
        abs(x - y) <= LR_TOLERANCE * max(abs(x), abs(y))
        if isinstance(x, (int, float)) and isinstance(y, (int, float))
        else x == y
        for x, y in zip(a, b, strict=True)
    )


def _shown(rates: Sequence[JsonValue]) -> str:
    return ", ".join(f"{r:.8g}" if isinstance(r, float) else str(r) for r in rates)
