"""Restore on more data-parallel ranks: capacity came back, or the job moves to a larger pool.

Judged as dp-shrink is. Ranks that did not exist before have no random state of their own to
continue:
the matrix must declare what is expected of them.
"""

from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Source and its continuation, the controls, and one restore at the target."""
    return shared.continues(cell)
