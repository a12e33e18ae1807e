"""Damage one shard of a private copy, restore it, and see who notices.

Storage flips bits, loses pages, cuts files and drops them; copy tools mix up ranks and steps. A
stack that loads the damage trains on it for weeks; one that refuses without an older checkpoint to
fall back to stops the job. Pass needs both: the damage is noticed, and training continues from a
whole older checkpoint, with the full proof of continuity.

Whatever the stack does, a manifest of the undamaged checkpoint is held against the damaged copy, so
that the verdict says who noticed: the framework, the manifest, or nobody. With `guard: manifest`
the launch does what a launcher does that verifies first: it restores the newest older checkpoint
that is whole in place of one that is not.
"""

from ckptdrill.errors import UserError
from ckptdrill.model import Cell, Claim, Damage, DamageKind, Guard, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.DETECTS_DAMAGE
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "kind": tuple(kind for kind in DamageKind if kind is not DamageKind.POINTER),
    "guard": tuple(Guard),
    "tensor": str,  # glob over fully qualified names; default: the largest weight
    "file": str,  # glob over the files of the checkpoint, in place of a tensor: the largest
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """The undamaged restore is the twin: it must hold before the damaged one says anything."""
    kind = DamageKind(cell.parameters.get("kind", DamageKind.BIT_FLIP))
    if kind is DamageKind.SWAP and cell.source.world_size == 1:
        raise UserError(
            "swap needs the shards of two ranks, and the source has one",
            where=f"cell {cell.id}",
            hint="name a source of several ranks, or another kind",
        )
    parameters = {k: v for k, v in cell.parameters.items() if k != "kind"}
    if kind is DamageKind.FOREIGN_SHARD:
        parameters["foreign_step"] = shared.older_save(cell)
    if cell.parameters.get("guard") == Guard.MANIFEST:
        shared.older_save(cell)  # there must be one to go back to
    damage = Damage(f"damage.{cell.id}", kind, shared.checkpoint_of(cell), parameters)
    return shared.continues(cell, damage=damage, claim=CLAIM)
