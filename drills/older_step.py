"""Restore a step that is not the newest: what a rollback after a loss spike or a bad batch does.

Newer checkpoints exist when the older one is restored; nothing of them may enter, neither through a
pointer nor through a file that both steps share.
"""

from dataclasses import replace

from ckptdrill.errors import UserError
from ckptdrill.model import Cell, Checkpoint, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "step": int,  # default: the newest saved step before job.restore_step
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """As a baseline, from an older checkpoint of the same source."""
    step = int(cell.parameters.get("step", 0)) or shared.older_save(cell)
    if step not in shared.saves:
        raise UserError(
            f"step {step} is not saved",
            where=f"cell {cell.id}",
            hint=f"choose one of job.saves: {', '.join(map(str, shared.saves))}",
        )
    whole = shared.continues(cell)
    checkpoint = Checkpoint(whole.source.id, step)
    place = (cell.target, cell.target_environment)
    return replace(whole, restore=shared.restore(checkpoint, *place, f"restore.{cell.id}"))
