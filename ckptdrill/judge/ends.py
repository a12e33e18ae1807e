"""Judge when training ends: a run that ends by itself inside the window ends as its reference does.

A job stops after so many steps, tokens, hours, or evaluations that brought nothing. What decides is
part of the training: where it is in no checkpoint the restored run ends sooner or later, and every
step that both made is equal. The drill itself ends a run only at the end of the window.
"""

from __future__ import annotations

from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Check, Held, Item

_SUBJECT = "the end of training"


def ended_otherwise(pair: Pair, control: Trajectory | None) -> Check | None:
    """The row of the completed step where the runs end otherwise; None where they do not."""
    if not pair.compared:
        return None
    wanted, found = own_end(pair.reference), own_end(pair.restored)
    end = pair.restore_step + pair.window
    if found is not None and found < min(end, pair.reference.last_step):
        what = f"the restored run ended by itself after step {found}, the reference trains on"
    elif wanted is not None and wanted < min(end, pair.restored.last_step):
        what = f"the restored run trains on, the reference ended by itself after step {wanted}"
    else:
        return None
    as_control = control is not None and own_end(control) == found
    if as_control:
        what += "; an uninterrupted run at the target does as the restored one"
    return Check(
        Item.STEP,
        Held.BROKEN,
        what,
        subjects=(_SUBJECT,),
        facts=pair.reference.refs(pair.compared[-1:]) + pair.restored.refs(pair.compared[-1:]),
        numbers={"ended": found, "reference_ended": wanted, "as_control": as_control},
    )


def is_end(check: Check) -> bool:
    """Whether a row is broken by where training ends, and by nothing before."""
    return _SUBJECT in check.subjects


def own_end(run: Trajectory) -> int | None:
    """The step after which the program of every rank came to its end; None where the drill ended
    it, or an error did.
    """
    record = run.record
    ended = {fact.rank for fact in record.of("exited") if fact.data.get("code") == 0}
    stopped = record.of("stopped")
    return run.last_step if not stopped and len(ended) == record.world_size else None
