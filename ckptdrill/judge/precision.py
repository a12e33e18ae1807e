"""Judge the state of precision: loss scaler, fp8 scales, averages of the weights that are no
module, and the train or eval mode of the layers.

A scaler whose scale never moved, and scales that never changed, have not been exercised: they would
look the same had they been lost.
"""

from __future__ import annotations

from ckptdrill.judge import averages
from ckptdrill.judge import state as states
from ckptdrill.judge.inventory import saved_at, saved_steps
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Check, Held, Item, JsonValue

_EXTRA = "_extra_state"


def row(pair: Pair, state: states.Sampled) -> Check:
    """One row: broken, not exercised, or held."""
    if state.missing:
        return Check(Item.PRECISION, Held.NOT_OBSERVED, state.missing, facts=state.refs)
    problems = [*states.scaler_differences(state), *averages.lost(pair), *_modes(pair)]
    if problems:
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        subjects = tuple(problem.split(" ", 1)[0] for problem in problems[:8])
        return Check(
            Item.PRECISION,
            Held.BROKEN,
            problems[0] + more,
            subjects,
            tuple(problems[:8]),
            state.refs,
        )
    scaler, extra = _idle_scaler(pair), _idle_extra_state(pair)
    if scaler or extra:
        how = "a short growth_interval" if scaler else "a device that has the type, a later save"
        return Check(
            Item.PRECISION,
            Held.NOT_EXERCISED,
            scaler or extra or "",
            facts=state.refs,
            next_move=f"make it change before the save ({how}), or declare the item out of scope",
        )
    used = any(scaler for fact in state.source for scaler in fact.data["scalers"])
    summary = "loss scaler state equal" if used else "no loss scaler in use"
    return Check(Item.PRECISION, Held.HELD, summary + _doubts(pair), facts=state.refs)


def _doubts(pair: Pair) -> str:
    """What is laid out like the weights, changes and differs, and is not shown to be state."""
    names = averages.in_doubt(pair)
    if not names:
        return ""
    return (
        f"; {', '.join(names)} has the weights' shapes, changes from step to step and differs from "
        "the reference's: if that is state, save it, or tell it to the probe"
    )


def _modes(pair: Pair) -> list[str]:
    """Layers that train in one run and are in eval mode in the other."""
    then, now = (_in_eval_mode(run, pair.restore_step) for run in (pair.reference, pair.restored))
    if then is None or now is None:
        return []
    told = dict.fromkeys(now - then, "eval") | dict.fromkeys(then - now, "train")
    return [
        f"{name} is in {mode} mode, in the reference it is not"
        for name, mode in sorted(told.items())
    ]


def _in_eval_mode(run: Trajectory, step: int) -> frozenset[str] | None:
    """The layers of any rank that are in eval mode and for which that counts."""
    facts = run.sample("roots", step, "forward")
    return frozenset(name for f in facts for name in f.data.get("eval", ())) if facts else None


def _idle_scaler(pair: Pair) -> str:
    scales = [_scales(pair, step) for step in pair.reference.sampled_steps()]
    used = [scale for scale in scales if scale]
    if not used or any(scale != used[0] for scale in used):
        return ""
    return "the loss scale never moved: no overflow and no growth before or after the save"


def _scales(pair: Pair, step: int) -> list[JsonValue]:
    facts = pair.reference.sample("state", step)
    return [scaler.get("scale") for scaler in facts[0].data["scalers"] if scaler] if facts else []


def _idle_extra_state(pair: Pair) -> str:
    """Modules keep fp8 scales in `_extra_state`; without hardware for fp8 they stay as they are."""
    saves = [saved_at(pair.reference, step) for step in saved_steps(pair.reference)]
    seen = [{key: repr(s.values(key)) for key in s.keys if _EXTRA in key} for s in saves]
    if len(seen) < 2 or not seen[0] or any(each != seen[0] for each in seen):
        return ""
    return f"{next(iter(seen[0]))} never changed from one save to the next"
