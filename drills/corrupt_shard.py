"""Damage one shard of a private copy, restore it, and see who notices.

Storage flips bits, truncates files and loses them. A stack that loads the damage trains on it for
weeks; one that refuses without an older checkpoint to fall back to stops the job. Pass needs both:
the damage is noticed, and training continues from a whole older checkpoint.
"""

from ckptdrill.model import Cell, Claim, Damage, DamageKind, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.DETECTS_DAMAGE
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "kind": tuple(DamageKind),
    "tensor": str,  # glob over fully qualified names; default: the largest weight
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """The undamaged restore is the twin: it must hold before the damaged one says anything."""
    damage = Damage(
        id=f"damage.{cell.id}",
        kind=DamageKind(cell.parameters.get("kind", DamageKind.BIT_FLIP)),
        checkpoint=shared.checkpoint_of(cell),
        parameters={k: v for k, v in cell.parameters.items() if k != "kind"},
    )
    return shared.continues(cell, damage=damage, claim=CLAIM)
