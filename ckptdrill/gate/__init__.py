"""The gate of a migration: the conditions of the restore contract, one by one, on a stored packet.

In the order things happen: `inputs` reads the packet, the checkpoint and the environment that will
run; `conditions` (pure) says of each condition whether it is held, not held or not known, which
counts as not held; `approval` records who approved, signed, beside the packet.
"""

from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptdrill.errors import ExitCode
from ckptdrill.gate import approval
from ckptdrill.gate.conditions import (
    NAMES,
    Approval,
    Condition,
    Inputs,
    Standing,
    conditions,
    of_drill,
)
from ckptdrill.gate.inputs import Options, age_s, gather, recorded
from ckptdrill.packet import GateRow

__all__ = [
    "NAMES",
    "Approval",
    "Condition",
    "Inputs",
    "Options",
    "Standing",
    "age_s",
    "approve",
    "conditions",
    "exit_code",
    "gather",
    "preview",
]


def preview(root: Path) -> tuple[GateRow, ...]:
    """How the conditions that the packet at `root` decides by itself stand, for its page."""
    found = of_drill(recorded(root))
    return tuple(GateRow(each.name, each.standing, each.found, each.next_move) for each in found)


def approve(
    root: Path, inputs: Inputs, who: tuple[str, str], key: Ed25519PrivateKey
) -> tuple[Condition, ...]:
    """Record the approval of `who` (name, time) if all other conditions are held, and judge again.

    The key that just signed is the one that is expected.
    """
    others = conditions(inputs)[:-1]
    if all(each.standing is Standing.HELD for each in others):
        given = approval.record(root, *who, others, key)
        return conditions(replace(inputs, approval=given, trusted=inputs.trusted or given.key))
    refused = Approval(problem="not recorded: other conditions are not held")
    return conditions(replace(inputs, approval=refused))


def exit_code(inputs: Inputs, found: tuple[Condition, ...]) -> ExitCode:
    """0 all held, 1 something is not held, 3 something is only not known, 4 the source changed."""
    standings = {each.standing for each in found}
    summary = inputs.packet.get("summary")
    if isinstance(summary, dict) and summary.get("source_unchanged") is False:
        return ExitCode.SOURCE_CHANGED
    if Standing.NOT_HELD in standings:
        return ExitCode.UNSUPPORTED
    return ExitCode.UNPROVEN if Standing.NOT_KNOWN in standings else ExitCode.AS_EXPECTED
