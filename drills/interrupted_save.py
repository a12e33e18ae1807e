"""Interrupt a save at every file event, on every rank, and restore what each interruption leaves.

A save that is cut off must leave a whole generation: the one being saved, or the one before it.
Into a fresh folder that is easy; over an existing checkpoint, a writer that replaces files in place
leaves the old and the new mixed, or neither. The save is recorded once, undisturbed; what is left
at every point is worked out from that record, restored by the job, and judged with the full proof
of continuity. A few points are interrupted for real: they must leave what was worked out.

The undisturbed recording, restored, is the twin.
"""

from dataclasses import replace

from ckptdrill.errors import UserError
from ckptdrill.model import Cell, Checkpoint, Claim, FaultKind, Launch, Plan, Replay, Role
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.KEEPS_A_GENERATION
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "how": ("kill", "terminate", "leave"),  # default: kill, at every point, torn files included
    "over": ("fresh", "existing"),  # where the save goes; default: fresh
    "confirm": int,  # how many points are interrupted in real launches; default: 3
}
_KINDS = {
    "kill": (FaultKind.KILL, FaultKind.TORN),
    "terminate": (FaultKind.TERMINATE,),
    "leave": (FaultKind.LEAVE,),
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Two recordings of the save, the replay that plans all else, and the undisturbed restore."""
    confirm = int(cell.parameters.get("confirm", 3))
    if confirm < 1:
        raise UserError(
            "confirm must be 1 or more: what is worked out proves nothing by itself",
            where=f"cell {cell.id}",
        )
    whole = shared.continues(cell)
    existing = cell.parameters.get("over") == "existing"
    older = Checkpoint(whole.source.id, shared.older_save(cell)) if existing else None
    recorded: Launch = replace(
        whole.source,
        id=f"record.{cell.id}",
        role=Role.INTERRUPTED,
        stop_step=shared.restore_step,
        over=older,
    )
    twin = shared.restore(
        Checkpoint(recorded.id, shared.restore_step),
        cell.target,
        cell.target_environment,
        f"restore.{cell.id}.undisturbed",
    )
    replay = Replay(
        id=f"replay.{cell.id}",
        recorded=recorded,
        again=replace(recorded, id=f"again.{cell.id}"),
        kinds=_KINDS[str(cell.parameters.get("how", "kill"))],
        confirm=confirm,
    )
    return replace(whole, claim=CLAIM, restore=twin, replay=replay)
