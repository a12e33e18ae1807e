"""Resume, train, save, and resume again from what the resumed run saved.

State that a restore loses only in part (a counter that starts again, an average of averages, a
cursor counted from the restart) often survives one resume and is wrong after the second.
"""

from dataclasses import replace

from ckptdrill.model import Cell, Checkpoint, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Restore at the target, go on to the next save, and restore that one at the target again."""
    place = (cell.target, cell.target_environment)
    first = shared.restore(shared.checkpoint_of(cell), *place, f"restore.{cell.id}.first")
    again = Checkpoint(first.id, shared.next_save(cell))
    second = shared.restore(again, *place, f"restore.{cell.id}.second")
    return replace(shared.continues(cell), through=first, restore=second)
