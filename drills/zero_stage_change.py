"""Restore under another ZeRO stage on as many ranks: the same training, partitioned otherwise.

What a stage partitions (moments, gradients, parameters) is laid out otherwise on every rank: a
stack that reads its own files back as they are must refuse, and one that converts must lose
nothing.
"""

from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """Source and its continuation, the controls, and one restore at the target."""
    return shared.continues(cell)
