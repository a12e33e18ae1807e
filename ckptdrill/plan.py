"""Cells to one list of plans whose launches are shared. Pure: nothing is started or read here.

Process start is the cost of a drill, so cells share what they can: one source run per source
topology, its repeats, one uninterrupted control per target topology, one same-topology restore that
is the control of every verdict. A drill file says which of them it needs through `SharedLaunches`;
two cells that ask for the same launch get the same id, and the schedule runs an id once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptdrill import drill as drill_files
from ckptdrill.errors import UserError
from ckptdrill.model import (
    Cell,
    Checkpoint,
    Claim,
    Convert,
    Damage,
    Launch,
    Plan,
    RngPolicy,
    Role,
    Step,
    Topology,
)
from ckptdrill.placeholders import resumes_in_place

if TYPE_CHECKING:
    from ckptdrill.matrix import Matrix


@dataclass(frozen=True)
class SharedLaunches:
    """The launches every drill builds upon, named so that equal ones coincide."""

    restore_step: int
    saves: tuple[int, ...]
    end_step: int
    repeats: int
    resumes_in_place: bool = False  # the job is told no path: it finds its checkpoint itself
    tier_saves: tuple[int, ...] = ()  # steps saved in the memory tier
    rng: RngPolicy = RngPolicy.CONTINUED  # across a restore at the same number of ranks

    def source(self, topology: Topology, environment: str) -> Launch:
        """The run that saves and goes on: its continuation is the reference trajectory."""
        name = f"source.{_place(topology, environment)}"
        return Launch(name, Role.SOURCE, topology, environment, self.end_step)

    def repeat(self, topology: Topology, environment: str, number: int) -> Launch:
        """The source run once more: what does not repeat itself cannot be held
        against a restore.
        """
        name = f"repeat{number}.{_place(topology, environment)}"
        return Launch(name, Role.REPEAT, topology, environment, self.end_step)

    def other_stream(self, topology: Topology, environment: str) -> Launch | None:
        """The source run once more, drawing other random numbers after the save: how far runs are
        apart that differ in nothing else. None where the random state is to continue.
        """
        if self.rng is RngPolicy.CONTINUED:
            return None
        name = f"other-stream.{_place(topology, environment)}"
        once_more = self.repeat(topology, environment, 1)
        return replace(once_more, id=name, other_stream_from=self.restore_step)

    def control(self, topology: Topology, environment: str) -> Launch:
        """An uninterrupted run at the target: what the topology alone does to the loss."""
        name = f"control.{_place(topology, environment)}"
        return Launch(name, Role.CONTROL, topology, environment, self.end_step)

    def restore(
        self,
        checkpoint: Checkpoint,
        topology: Topology,
        environment: str,
        name: str,
        extra_args: tuple[str, ...] = (),
    ) -> Launch:
        """A fresh process restores `checkpoint` at a target topology and trains on."""
        return Launch(
            name, Role.RESTORE, topology, environment, self.end_step, checkpoint, extra_args
        )

    def conversion(self, cell: Cell) -> Convert | None:
        """The conversion whose result a cell restores: one for all cells of a source."""
        if cell.conversion is None:
            return None
        checkpoint = self.checkpoint_of(cell)
        name = f"convert.{cell.conversion}.{_place(cell.source, cell.source_environment)}"
        return Convert(name, cell.conversion, checkpoint, cell.source, cell.source_environment)

    def older_save(self, cell: Cell) -> int:
        """The newest saved step before the restored one.

        Raises UserError when there is none.
        """
        older = [step for step in self.saves if step < self.restore_step]
        if not older:
            raise UserError(
                f"no step before {self.restore_step} is saved",
                where=f"cell {cell.id}",
                hint="add an earlier step to job.saves, or restore a later one (job.restore_step)",
            )
        return older[-1]

    def failure_step(self, cell: Cell) -> int:
        """The step after which a job with a memory tier fails: in the tier, not on durable storage.

        Raises UserError when there is no such step.
        """
        newer = [step for step in self.tier_saves if step > self.restore_step]
        step = int(cell.parameters.get("step", 0)) or next(iter(newer), 0)
        if step not in newer:
            raise UserError(
                f"the memory tier saves no step {step or ''} after {self.restore_step}",
                where=f"cell {cell.id}",
                hint="declare job.memory_tier, with a step in its saves that is newer than "
                "job.restore_step",
            )
        return step

    def next_save(self, cell: Cell) -> int:
        """The first saved step after the restored one.

        Raises UserError when there is none.
        """
        later = [step for step in self.saves if step > self.restore_step]
        if not later:
            raise UserError(
                f"no step after {self.restore_step} is saved",
                where=f"cell {cell.id}",
                hint="add a later step to job.saves: this drill needs one after the restored step",
            )
        return later[0]

    def continues(
        self, cell: Cell, damage: Damage | None = None, claim: Claim | None = None
    ) -> Plan:
        """The plan most drills want: source, repeats, both controls, and the drilled restore."""
        source = self.source(cell.source, cell.source_environment)
        conversion = self.conversion(cell)
        checkpoint = Checkpoint(
            source.id,
            self.restore_step,
            damage.id if damage else None,
            conversion_id=conversion.id if conversion else None,
        )
        here = (cell.source, cell.source_environment)
        there = (cell.target, cell.target_environment)
        clean = Checkpoint(source.id, self.restore_step)
        baseline = self.restore(clean, *here, f"restore.{_place(*here)}.baseline")
        as_saved = damage is None and conversion is None
        is_baseline = as_saved and _place(*here) == _place(*there)
        return Plan(
            cell=cell,
            claim=claim or Claim.CONTINUES,
            source=source,
            repeats=tuple(self.repeat(*here, n) for n in range(1, self.repeats + 1)),
            baseline=baseline,
            restore=baseline
            if is_baseline
            else self.restore(checkpoint, *there, f"restore.{cell.id}"),
            control=None if cell.source.same_layout(cell.target) else self.control(*there),
            other_stream=self.other_stream(*here),
            damage=damage,
            conversion=conversion,
        )

    def checkpoint_of(self, cell: Cell) -> Checkpoint:
        """The undamaged checkpoint a cell restores."""
        return Checkpoint(self.source(cell.source, cell.source_environment).id, self.restore_step)


def plan_all(matrix: Matrix) -> tuple[Plan, ...]:
    """One plan per cell, in the order of the matrix.

    Raises UserError when two cells want different launches under one name.
    """
    job = matrix.job
    shared = SharedLaunches(
        restore_step=job.restore_step,
        saves=job.saves,
        end_step=job.end_step,
        repeats=matrix.repeats,
        resumes_in_place=resumes_in_place(job),
        tier_saves=job.memory_tier.saves if job.memory_tier else (),
        rng=matrix.policy.rng_same_world_size,
    )
    shared = replace(shared, end_step=max(job.end_step, _beyond(matrix, shared) + job.window))
    plans = tuple(
        drill_files.load(cell.drill).plan(cell, shared) if cell.drilled else shared.continues(cell)
        for cell in matrix.cells
    )
    steps_of(plans)
    return plans


def quiet_pair(plan: Plan) -> tuple[Launch, ...]:
    """The two restores without random layers, at the source's topology and at the target's, that
    tell whether their first gradients are the same; none for a plan that asks something else.
    """
    restored = plan.restore.restores
    asks_else = (plan.damage, plan.replay, plan.stalled, plan.through, plan.intact)
    if plan.control is None or restored is None or any(step is not None for step in asks_else):
        return ()
    if plan.claim is not Claim.CONTINUES or plan.restore.extra_args or not plan.cell.drilled:
        return ()
    here = _place(plan.source.topology, plan.source.environment)
    saved = Checkpoint(plan.source.id, restored.step)
    there = replace(
        plan.restore, id=f"quiet.{plan.cell.id}", stop_step=restored.step + 1, quiet=True
    )
    name = f"quiet.{here}.{restored.step}"
    source = (plan.source.topology, plan.source.environment)
    return (
        replace(there, id=name, topology=source[0], environment=source[1], restores=saved),
        there,
    )


def _beyond(matrix: Matrix, shared: SharedLaunches) -> int:
    """The newest step that any cell restores: the reference must go on beyond that one, too."""
    steps = [shared.restore_step]
    for cell in (each for each in matrix.cells if each.drilled):
        if cell.drill in ("chained-resume", "storage-stall"):
            steps += [step for step in shared.saves if step > shared.restore_step][:1]
        elif cell.drill == "memory-tier-loss":
            steps.append(shared.failure_step(cell))
    return max(steps)


def steps_of(plans: Iterable[Plan]) -> Mapping[str, Step]:
    """Every step of all plans once, by id, dependencies before dependants.

    Raises UserError when one id stands for two different steps.
    """
    steps: dict[str, Step] = {}
    for plan in plans:
        for step in plan.steps:
            known = steps.setdefault(step.id, step)
            if known != step:
                raise UserError(
                    f"two different steps are called {step.id!r}",
                    where=f"cell {plan.cell.id}",
                    hint="give the topologies of the matrix distinct names",
                )
    return steps


def cells_by_step(plans: Iterable[Plan]) -> Mapping[str, tuple[str, ...]]:
    """Which cells share each step."""
    sharing: dict[str, tuple[str, ...]] = {}
    for plan in plans:
        for step in plan.steps:
            sharing[step.id] = (*sharing.get(step.id, ()), plan.cell.id)
    return sharing


def _place(topology: Topology, environment: str) -> str:
    return topology.name if environment == "default" else f"{topology.name}-{environment}"
