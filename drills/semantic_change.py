"""Restore into a job that is no longer the same: an added layer, another optimizer or vocabulary.

No checkpoint can continue such a training as it was. The job must say so and stop; one that skips
what does not fit and trains on is the silent failure that this drill looks for.
"""

import shlex
from dataclasses import replace

from ckptdrill.drill import Arguments
from ckptdrill.model import Cell, Claim, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.FAILS_CLOSED
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "args": Arguments,  # what makes the restored job another one: "--layers 3"
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """The unchanged restore is the twin; the changed one gets the extra arguments."""
    extra = tuple(shlex.split(str(cell.parameters.get("args", ""))))
    restore = shared.restore(
        shared.checkpoint_of(cell),
        cell.target,
        cell.target_environment,
        f"restore.{cell.id}",
        extra,
    )
    return replace(shared.continues(cell), claim=CLAIM, restore=restore)
