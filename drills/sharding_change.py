"""Restore in another way of sharding on as many ranks: DDP, FSDP, hybrid, or back.

The world size stays, so that the random state of each rank must continue too, unless the owner
declares otherwise.
"""

from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Source and its continuation, the controls, and one restore at the target."""
    return shared.continues(cell)
