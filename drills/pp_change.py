"""Restore at another pipeline-parallel degree: layers move to more or fewer stages.

Names must not depend on the stage, and every parameter must be found by whoever holds it now, with
its moments and its place in the parameter groups. The samples are those of the first stage, the
loss that of the last; an uninterrupted control at the target says what the schedule alone does.
"""

from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Source and its continuation, the controls, and one restore at the target."""
    return shared.continues(cell)
