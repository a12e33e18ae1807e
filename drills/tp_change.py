"""Restore at another tensor-parallel degree: layers are split over more or fewer ranks.

Each logical tensor must come back bit for bit, whatever slabs it was stored in; ranks of one
tensor-parallel group see the same samples, which count once. The loss may differ by what the layout
alone does to it, measured by an uninterrupted control at the target.
"""

from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Source and its continuation, the controls, and one restore at the target."""
    return shared.continues(cell)
