"""Let storage be slow, full or failing for a while, and see what the job makes of it.

A save that fails must be heard of; what it leaves must not be taken for a checkpoint; the one
before it must still be whole; and saves in the background must not pile up behind slow storage. The
stall happens inside the job's own process, to whatever it writes below `{out}` from one step on.

The source run is the twin: the same launch without the stall.
"""

from dataclasses import replace

from ckptdrill.errors import UserError
from ckptdrill.model import Cell, Checkpoint, Claim, Fault, FaultKind, Launch, Plan, Role
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.KEEPS_A_GENERATION
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "kind": (FaultKind.SLOW, FaultKind.EIO, FaultKind.ENOSPC, FaultKind.TIMEOUT),
    "step": int,  # the stall begins with the first write after this step; default: restore_step
    "seconds": float,  # how long it lasts from then on; default: 5
    "writes": int,  # it is over after so many writes; default: all in that time
    "rank": int,  # the rank whose storage it is; default: every rank
    "in_flight": int,  # asynchronous saves that may be under way at once; default: 1
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """A source of its own that meets the stall, and restores of all that it may have left."""
    _refuse_what_cannot_fire(cell)
    whole = shared.continues(cell)
    step = int(cell.parameters.get("step", 0)) or shared.restore_step
    older = shared.older_save(cell)
    stalled: Launch = replace(
        whole.source, id=f"stalled.{cell.id}", role=Role.REPEAT, fault=_fault(cell, step)
    )
    if shared.resumes_in_place:
        left = (Checkpoint(stalled.id, step, template="{out}"),)
    else:
        later = [each for each in shared.saves if each > step][:1]
        left = tuple(Checkpoint(stalled.id, each) for each in (*later, step, older))
    place = (cell.target, cell.target_environment)
    restores = tuple(
        shared.restore(each, *place, f"restore.{cell.id}.step{each.step}") for each in left
    )
    return replace(whole, claim=CLAIM, stalled=stalled, generations=restores, restore=restores[-1])


def _refuse_what_cannot_fire(cell: Cell) -> None:
    rank, seconds = cell.parameters.get("rank"), cell.parameters.get("seconds", 5.0)
    if rank is not None and not 0 <= rank < cell.source.world_size:
        what = f"there is no rank {rank}: the source has {cell.source.world_size}"
    elif seconds <= 0:
        what = f"a stall of {seconds} seconds is none"
    else:
        return
    raise UserError(what, where=f"cell {cell.id}")


def _fault(cell: Cell, step: int) -> Fault:
    asked = cell.parameters
    return Fault(
        kind=FaultKind(asked.get("kind", FaultKind.ENOSPC)),
        rank=asked.get("rank"),
        parameters={
            "step": step,
            "seconds": float(asked.get("seconds", 5.0)),
            **({"writes": asked["writes"]} if "writes" in asked else {}),
        },
    )
