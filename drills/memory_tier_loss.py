"""Lose a job's memory tier, all of it, one rank's part, or its newest generations; then restore.

Fast checkpoints in memory go with the host that held them. What is left must still be one whole
generation for all ranks: the durable checkpoint, or an older one of the tier. A rank that takes
what it finds, while its neighbours take something else, trains on a mixture.

The same restore beside the tier as it was is the twin: it must come back with the newest step.
"""

from dataclasses import replace

from ckptdrill.errors import UserError
from ckptdrill.model import Cell, Checkpoint, Claim, Launch, Plan, Role, Tier, TierLoss
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.DETECTS_DAMAGE
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "loss": tuple(TierLoss),
    "step": int,  # the job fails after it; default: the tier's first save after restore_step
    "rank": int,  # whose part is lost with one-rank; default: the last
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """A source that ends with the failure, and two restores of what it left: one lost its tier."""
    whole = shared.continues(cell)
    failed_at = shared.failure_step(cell)
    failing = _failing(whole.source, failed_at)
    loss = TierLoss(cell.parameters.get("loss", TierLoss.ALL))
    early = _failing(whole.source, _stale_step(cell, shared)) if loss is TierLoss.STALE else failing
    rank = int(cell.parameters.get("rank", cell.source.world_size - 1))
    template = "{out}" if shared.resumes_in_place else None
    durable = Checkpoint(failing.id, shared.restore_step, template=template)
    place = (cell.target, cell.target_environment)
    twin = f"restore.{failing.id}.at-{cell.target.name}-{cell.target_environment}"
    intact: Launch = replace(shared.restore(durable, *place, twin), tier=Tier(failing.id))
    lost = replace(
        intact,
        id=f"restore.{cell.id}",
        tier=Tier(early.id, loss, rank if loss is TierLoss.ONE_RANK else None),
    )
    launches = (failing,) if early == failing else (failing, early)
    return replace(whole, claim=CLAIM, failing=launches, intact=intact, restore=lost)


def _failing(source: Launch, step: int) -> Launch:
    """The source once more, up to the failure: its tier and its storage are as they were then."""
    name = source.id.replace("source", f"failing-at-{step}", 1)
    return replace(source, id=name, role=Role.REPEAT, stop_step=step)


def _stale_step(cell: Cell, shared: SharedLaunches) -> int:
    older = [s for s in shared.tier_saves if s < shared.restore_step]
    if not older:
        raise UserError(
            f"the memory tier saves no step before {shared.restore_step}, so none can be stale",
            where=f"cell {cell.id}",
            hint="add an earlier step to job.memory_tier.saves",
        )
    return older[-1]
