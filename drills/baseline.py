"""Restore at the same topology, image and storage: does the job continue the same training?

It yields the reference every other drill of this source is measured against, and it is their
control:
where the baseline does not hold, nothing can be said of the cells beside it.
"""

from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Source and its continuation, the controls, and one restore at the target."""
    return shared.continues(cell)
