"""Restore in the same layout on another host: a node has died, or the pool is replaced.

The layout does not change, and what the job took from its old host is not there: files and keys by
host name, caches beside the job. The restored launch sees another name of its host, where the
kernel allows that; what the hardware of another node changes is not shown here.
"""

from dataclasses import replace

from ckptdrill.model import Cell, Claim, Launch, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {}
HOST = "replacement-node"


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """The restore of the baseline, under another host name; the baseline itself is its twin."""
    whole = shared.continues(cell)
    moved: Launch = replace(whole.restore, id=f"restore.{cell.id}", host=HOST)
    return replace(whole, restore=moved)
