"""Restore in another environment: a newer image reads what the old one wrote, or the reverse.

Formats promise less than people rely on, and nothing on disk may say which version wrote it. Both
directions are cells of their own: `two@old` to `two@new` is the upgrade, `two@new` to `two@old` the
way back. The uninterrupted control runs with the reader's versions, so that what they alone change
in the loss is measured. Where both environments turn out to import the same versions, nothing was
skewed, and the cell stays unproven.
"""

from dataclasses import replace

from ckptdrill.errors import UserError
from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Source and its continuation with the writer's versions; control and restore with the
    reader's.
    """
    if cell.source_environment == cell.target_environment:
        raise UserError(
            "version-skew needs a target in another environment than the source",
            where=f"cell {cell.id}",
            hint="write it as source: two@old, target: two@new, with both under environments",
        )
    control = shared.control(cell.target, cell.target_environment)
    return replace(shared.continues(cell), control=control)
