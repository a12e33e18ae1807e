"""Make `latest` and its like lie to a job that finds its checkpoint itself, and see where it ends.

A pointer is an index, never the truth: it may move before all shards are on disk, be written half,
lag behind, or be lost. Pass means that the job ends on one whole committed checkpoint, the newest
or an older one, and continues that training. Stopping without one is Unsupported, and so is the
silent way out: no pointer, hence no checkpoint, hence a training that begins again at step 0.

The job must find its checkpoint in `{out}`, told no path (no `{resume}`). The save before lies
there with the restored one; for `uncommitted` also the next one, without the file that commits it.
"""

from ckptdrill.errors import UserError
from ckptdrill.model import Cell, Claim, Damage, DamageKind, Plan, PointerLie
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.DETECTS_DAMAGE
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "kind": tuple(PointerLie),
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """As a damaged restore; the damage is to the pointers that the restore is given."""
    if not shared.resumes_in_place:
        raise UserError(
            "the job is told which checkpoint to restore, so no pointer can mislead it",
            where=f"cell {cell.id}",
            hint="this drill is for jobs without {resume}; leave it out of the matrix",
        )
    lie = PointerLie(cell.parameters.get("kind", PointerLie.MISSING))
    parameters: dict[str, str | int] = {"lie": lie.value}
    if lie in {PointerLie.MISSING, PointerLie.UNCOMMITTED}:
        parameters["named_step"] = shared.next_save(cell)
    elif lie is PointerLie.STALE:
        parameters["named_step"] = shared.older_save(cell)
    damage = Damage(f"damage.{cell.id}", DamageKind.POINTER, shared.checkpoint_of(cell), parameters)
    return shared.continues(cell, damage=damage, claim=CLAIM)
