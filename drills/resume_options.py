"""Restore with other arguments than the job has: options of the stack's own load call.

A load has switches that leave a part of the state behind, or read it another way: weights alone, no
optimizer, another order of a flat buffer. Few of them say so afterwards. What is restored under the
switch must be the same training as without it; the restore without it is the twin.
"""

import shlex
from dataclasses import replace

from ckptdrill.drill import Arguments
from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "args": Arguments,  # given to the restored job alone: "--weights-only"
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """The ordinary plan, with more arguments for the drilled restore."""
    whole = shared.continues(cell)
    extra = tuple(shlex.split(str(cell.parameters.get("args", ""))))
    here = (shared.checkpoint_of(cell), cell.target, cell.target_environment)
    return replace(whole, restore=shared.restore(*here, f"restore.{cell.id}", extra))
