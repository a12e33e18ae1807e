"""Restore where several degrees change at once: data, tensor and pipeline parallelism together.

What a migration to other nodes really does. The proof is that of the single changes, with an
uninterrupted control at the target.
"""

from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Source and its continuation, the controls, and one restore at the target."""
    return shared.continues(cell)
