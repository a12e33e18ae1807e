"""Restore on fewer data-parallel ranks: a smaller node pool, or a node that will not come back.

The state must be bitwise the same after resharding; the global batches must be the same samples at
every step; the loss may differ by what the topology alone does to it, measured by an uninterrupted
control at the target.
"""

from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Source and its continuation, the controls, and one restore at the target."""
    return shared.continues(cell)
