"""Restore a checkpoint that was saved between two micro-batches of a step.

A time limit or a preemption signal does not wait for the end of an accumulation. Gradients are
rarely saved, so such a checkpoint must be one of the step's beginning in every item: a cursor that
has moved on with the first micro-batch drops its samples without a word.

The job must be told to save there (`args`, for the reference job `--save-inside-step 8`) and
accumulate over two micro-batches or more. The same job without the mid-step save is the twin: its
baseline is a cell of every matrix.
"""

import re
import shlex
from dataclasses import replace

from ckptdrill.drill import Arguments, Template
from ckptdrill.model import Cell, Checkpoint, Claim, Launch, Plan
from ckptdrill.plan import SharedLaunches

CLAIM = Claim.CONTINUES
PARAMETERS: dict[str, tuple[str, ...] | type] = {
    "args": Arguments,  # what makes the source save inside a step
    "checkpoint": Template,  # where that checkpoint appears: "{out}/step-{step}-inside"
    "step": int,  # the last step completed before it; default: job.restore_step
}


def plan(cell: Cell, shared: SharedLaunches) -> Plan:
    """A source of its own that saves inside a step and goes on; a restore of that checkpoint."""
    whole = shared.continues(cell)
    extra = tuple(shlex.split(str(cell.parameters.get("args", ""))))
    told = re.sub(r"\W+", "-", " ".join(extra)).strip("-")  # other arguments, another source
    name = f"{whole.source.id}.inside.{told}"
    source: Launch = replace(whole.source, id=name, extra_args=extra)
    step = int(cell.parameters.get("step", 0)) or shared.restore_step
    template = cell.parameters.get("checkpoint")
    checkpoint = Checkpoint(source.id, step, template=None if template is None else str(template))
    place = (cell.target, cell.target_environment)
    restore = shared.restore(checkpoint, *place, f"restore.{cell.id}")
    return replace(whole, source=source, repeats=(), baseline=restore, restore=restore)
