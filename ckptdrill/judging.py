"""Read the facts of a run, have each cell judged, and write the verdicts down.

The effects around the judge: which records exist, why steps were skipped, what was damaged. The
baseline of every source is judged first, because it is the control of the cells beside it. A stored
run can be judged again at any time, without a launch.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import PurePosixPath

import msgspec

from ckptdrill import claims, interrupt, journal, placeholders
from ckptdrill.fact_files import read_launch
from ckptdrill.journal import Entry, StepState
from ckptdrill.judge import interruptions, storage, table, tiers
from ckptdrill.judge.evidence import Evidence
from ckptdrill.matrix import Matrix
from ckptdrill.model import (
    Claim,
    Held,
    Job,
    JsonValue,
    Launch,
    LaunchRecord,
    Plan,
    Reason,
    Replay,
    Verdict,
    VerdictWord,
    from_json,
    to_json,
)
from ckptdrill.plan import quiet_pair
from ckptdrill.store import RunFolder, read_json, write_json

_RESUMING = re.compile(r"resum|restart|restor|continue|load|ckpt|checkpoint", re.IGNORECASE)
# A baseline that is only incomplete says nothing against its neighbours: they have the same gap.
_OWN_MATTER = {Reason.EVIDENCE_MISSING, Reason.NOT_EXERCISED, Reason.NOISY_REFERENCE}
# Fact files that take as long to judge as a process takes to start.
_FILES_WORTH_A_PROCESS = 2000
# They cost differently, and the verdicts of one come over while the next is judged.
_PARTS_OF_A_PROCESS = 6
_LAUNCHES_KEPT = 8  # source, repeats, control, baseline, and the restores of one or two cells


def judge_run(run: RunFolder, matrix: Matrix, plans: Sequence[Plan]) -> tuple[Verdict, ...]:
    """Judge every cell from what is on disk and write `cells/<id>/verdict.json`.

    Every cell is judged by itself, so a large run is divided among the cores.
    """
    desk = _Desk(run, matrix, journal.replay(run))
    # Neighbours share their launches, of which only the last few are kept.
    order = sorted(range(len(plans)), key=lambda n: (plans[n].source.id, _control_id(plans[n])))
    ordered = [plans[n] for n in order]
    workers = _workers(plans)
    judged = desk.judged(desk.given(ordered)) if workers == 1 else _divided(desk, ordered, workers)
    by_place = dict(zip(order, judged, strict=True))
    return tuple(by_place[n] for n in range(len(plans)))


_Given = tuple[Plan, str | None]  # a plan, and why its control failed


def _divided(desk: _Desk, plans: Sequence[Plan], workers: int) -> list[Verdict]:
    """The verdicts of these plans, by that many processes."""
    # Forking would copy whatever threads and locks the run has left here.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(desk,))
    with pool, _no_collection():
        for _ in range(workers):
            pool.submit(_part, ())  # they start while the controls are judged
        given = desk.given(plans)
        size = -(-len(given) // (workers * _PARTS_OF_A_PROCESS))
        parts = [given[at : at + size] for at in range(0, len(given), size)]
        return [verdict for part in pool.map(_part, parts) for verdict in _VERDICTS.decode(part)]


_here: list[_Desk] = []  # in a process that judges a part: its desk


def _begin(desk: _Desk) -> None:
    """Begin a process that judges parts of a run. It ends without taking its memory apart, for
    which the run would wait a second: by then its verdicts are handed over.
    """
    _here.append(desk)
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=0)


def _part(given: Sequence[_Given]) -> bytes:
    """The verdicts as `_VERDICTS` reads them: a pickle takes three times as long."""
    return msgspec.msgpack.encode(_here[0].judged(given))


_VERDICTS = msgspec.msgpack.Decoder(list[Verdict])


@dataclass(frozen=True)
class _Desk:
    """What judging the cells of a run takes."""

    run: RunFolder
    matrix: Matrix
    latest: Mapping[str, Entry]  # the last entry of every step in the journal

    @cached_property
    def _skipped(self) -> Mapping[str, str]:
        return {step: _why(entry) for step, entry in self.latest.items() if entry.lost}

    @cached_property
    def _record(self) -> Callable[[str, int], LaunchRecord]:
        """A launch's facts; those that cells share stay, those of one restore make room."""
        return lru_cache(maxsize=_LAUNCHES_KEPT)(self._read)

    def _read(self, launch: str, world_size: int) -> LaunchRecord:
        # What a run that was stopped took down with it says nothing about the job.
        if launch in self.latest and self.latest[launch].state is not StepState.ENDED:
            return LaunchRecord.made_of(launch, (), None, world_size)
        return read_launch(self.run, launch, world_size)

    def given(self, plans: Sequence[Plan]) -> list[_Given]:
        """These plans, each beside why its control failed."""
        drilled = {plan.baseline.id: plan for plan in plans if plan.cell.drilled}
        with _no_collection():
            failures = {
                name: _control_failure(self.verdict(_baseline_plan(plan), None))
                for name, plan in drilled.items()
            }
        return [(plan, failures.get(plan.baseline.id)) for plan in plans]

    def judged(self, given: Sequence[_Given]) -> list[Verdict]:
        """Judge these plans and write each verdict."""
        verdicts = []
        with _no_collection():
            for plan, control_failed in given:
                verdicts.append(self.verdict(plan, control_failed))
                _write_verdict(self.run, plan, verdicts[-1])
        return verdicts

    def verdict(self, plan: Plan, control_failed: str | None) -> Verdict:
        """The verdict of one plan; a chain that breaks at its first resume ends there."""
        left_out = self._left_out(plan)
        if left_out is not None:
            return _not_run(plan, left_out)
        if plan.replay is not None:
            return self._interrupted(plan, plan.replay, control_failed)
        if plan.stalled is not None:
            return table.safely(storage.judge, self._evidence(plan, control_failed))
        if plan.intact is not None:
            return table.safely(tiers.judge, self._evidence(plan, control_failed))
        if plan.through is None:
            return table.judge(self._evidence(plan, control_failed))
        first = self.verdict(replace(plan, restore=plan.through, through=None), control_failed)
        if _broken(first):
            return replace(first, explanation=f"the first resume already: {first.explanation}")
        return table.judge(self._evidence(_second_resume(plan), control_failed))

    def _left_out(self, plan: Plan) -> str | None:
        """The first step of a plan that the time budget of the run left no time for, and why."""
        ids = [step.id for step in (*plan.steps, *_asked(self.run, self.matrix, plan))]
        for step_id in ids:
            entry = self.latest.get(step_id)
            if entry is not None and entry.state is StepState.LEFT_OUT:
                return f"{step_id} was left out: {entry.reason}"
        return None

    def _interrupted(self, plan: Plan, step: Replay, control_failed: str | None) -> Verdict:
        """The verdict of a save that was interrupted; its undisturbed twin is judged first."""
        bare = replace(plan, claim=Claim.CONTINUES, replay=None)

        def tried(launch: Launch) -> interruptions.Tried:
            given = self._evidence(replace(bare, restore=launch), control_failed)
            return interruptions.came_back(replace(given, checkpoint_root=None))

        found = _interruptions(self.run, self.matrix, plan, self._record, tried)
        why_not = self._skipped.get(step.id, "the replay has not run")
        twin = table.judge(self._evidence(bare, control_failed))
        return interruptions.judge(plan, twin, found, why_not)

    def _evidence(self, plan: Plan, control_failed: str | None) -> Evidence:
        quiet = [each for each in quiet_pair(plan) if each.id in self.latest]
        launches = [step for step in plan.steps if isinstance(step, Launch)] + quiet
        records = {each.id: self._record(each.id, each.topology.world_size) for each in launches}
        found = _evidence(self.run, self.matrix, plan, records, self._skipped, control_failed)
        return replace(found, quiet=tuple(quiet))


def _not_run(plan: Plan, why: str) -> Verdict:
    return Verdict(
        cell_id=plan.cell.id,
        claim=plan.claim,
        word=VerdictWord.UNPROVEN,
        reason=Reason.NOT_RUN,
        explanation=why,
        next_move="give the run more time, or continue it with --resume",
    )


def _asked(run: RunFolder, matrix: Matrix, plan: Plan) -> tuple[Launch, ...]:
    """The launches that the replay of a plan has asked for, once it has run."""
    if plan.replay is None or not run.replay(plan.replay.id).exists():
        return ()
    in_place = placeholders.resumes_in_place(matrix.job)
    return interrupt.launches(plan, read_json(run.replay(plan.replay.id)), in_place=in_place)


def _control_id(plan: Plan) -> str:
    return plan.control.id if plan.control else ""


def _workers(plans: Sequence[Plan]) -> int:
    """How many processes judge: one where starting others takes longer than the work."""
    files = sum(plan.restore.topology.world_size for plan in plans)
    cores = len(os.sched_getaffinity(0))
    return min(cores, files // _FILES_WORTH_A_PROCESS) or 1


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Facts are trees of plain values: looking for cycles among millions of them, as the collector
    does whenever many are made, takes longer than reading them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _interruptions(
    run: RunFolder,
    matrix: Matrix,
    plan: Plan,
    record_of: Callable[[str, int], LaunchRecord],
    tried: Callable[[Launch], interruptions.Tried],
) -> interruptions.Interruptions | None:
    """What the replay of a plan and the launches that it asked for left; None before it has run."""
    step = plan.replay
    if step is None or not run.replay(step.id).exists():
        return None
    record = read_json(run.replay(step.id))
    in_place = placeholders.resumes_in_place(matrix.job)
    launches = {each.id: each for each in interrupt.launches(plan, record, in_place=in_place)}
    came_back = cache(lambda launch_id: tried(launches[launch_id]))
    confirmed = []
    for point in interrupt.confirmed(step, record):
        launch_id = interrupt.confirmation_id(step, point)
        left = run.launch(launch_id) / "left.json"
        of_it = record_of(launch_id, step.recorded.topology.world_size)
        fired = next(iter(of_it.refs(of_it.of("fault_fired"))), None)
        content = read_json(left) if left.exists() else None
        confirmed.append(interruptions.Interrupted(point, launch_id, fired, content))
    return interruptions.Interruptions(
        record,
        {
            state: tuple(
                came_back(launch_id)
                for _, launch_id in interrupt.restores_of(plan, record, state, in_place=in_place)
            )
            for state in record["states"]
        },
        tuple(confirmed),
    )


def stored_plans(run: RunFolder) -> tuple[Plan, ...]:
    """The plans of a stored run, in the order of the matrix.

    Raises UserError when a plan cannot be read.
    """
    folders = sorted((run.root / "cells").glob("*/plan.json"))
    return tuple(from_json(Plan, read_json(path)) for path in folders)


def _evidence(
    run: RunFolder,
    matrix: Matrix,
    plan: Plan,
    records: Mapping[str, LaunchRecord],
    skipped: Mapping[str, str],
    control_failed: str | None,
) -> Evidence:
    job = matrix.job
    damage = run.damage(plan.damage.id) if plan.damage else None
    return Evidence(
        plan=plan,
        policy=matrix.policy,
        tolerance=matrix.tolerance,
        records=records,
        restore_step=plan.restore.restores.step if plan.restore.restores else job.restore_step,
        start_step=plan.source.restores.step if plan.source.restores else job.start_step,
        window=job.window,
        saves=job.saves,
        checkpoint_suffix=_suffix(matrix, plan),
        checkpoint_root=_root(matrix, plan),
        skipped=skipped,
        # What the load of a conversion is told beside these is no argument to blame.
        resume_only=_resume_only(job),
        damage=read_json(damage) if damage is not None and damage.exists() else None,
        exclusions=() if plan.cell.drilled else _exclusions(job.stack, plan),
        tier_saves=job.memory_tier.saves if job.memory_tier else (),
        tiers=_tier_records(run, plan),
        conversion=_conversion_record(run, plan),
        control_failed=control_failed,
    )


def _exclusions(stack: str | None, plan: Plan) -> tuple[str, ...]:
    cell = plan.cell
    found = claims.exclusions(stack, cell.source, cell.target, cell.drill)
    return tuple(f"{claim.source.version} documents: “{claim.quote}”" for claim in found)


def _tier_records(run: RunFolder, plan: Plan) -> Mapping[str, Mapping[str, JsonValue]]:
    """Launch id -> what it found of a memory tier."""
    records = {s.id: run.tier(s.id) for s in plan.steps if isinstance(s, Launch) and s.tier}
    return {launch_id: read_json(path) for launch_id, path in records.items() if path.exists()}


def _conversion_record(run: RunFolder, plan: Plan) -> Mapping[str, JsonValue] | None:
    if plan.conversion is None or not run.conversion(plan.conversion.id).exists():
        return None
    record: Mapping[str, JsonValue] = read_json(run.conversion(plan.conversion.id))
    return record


def _baseline_plan(plan: Plan) -> Plan:
    """The control of a plan as a plan of its own: the same source, restored without a fault."""
    cell = replace(plan.cell, target=plan.cell.source, drill="baseline")
    return Plan(
        cell,
        Claim.CONTINUES,
        plan.source,
        plan.repeats,
        plan.baseline,
        plan.baseline,
        other_stream=plan.other_stream,
    )


def _second_resume(plan: Plan) -> Plan:
    """The second link of a chain: the first restored run saved it and went on, so that run is the
    reference of the second, whatever round-off its topology brought.
    """
    source = plan.through or plan.source
    return replace(plan, source=source, repeats=(), control=None, through=None)


def _control_failure(verdict: Verdict) -> str | None:
    """Why the cells beside a baseline cannot be judged. Incomplete evidence is their own matter."""
    own_matter = verdict.reason in _OWN_MATTER and not _broken(verdict)
    if verdict.word is VerdictWord.PASS or own_matter:
        return None
    return verdict.explanation


def _broken(verdict: Verdict) -> bool:
    ended = not verdict.checks or verdict.word is VerdictWord.UNSUPPORTED
    return ended or any(check.status is Held.BROKEN for check in verdict.checks)


def _suffix(matrix: Matrix, plan: Plan) -> str:
    """The checkpoint path below `{out}`, by which the save call of the source is recognised."""
    path, names_its_step = _below_out(matrix, plan)
    return path if names_its_step else ""  # a root of generations does not tell which is restored


def _root(matrix: Matrix, plan: Plan) -> str | None:
    """The checkpoint path below `{out}` of a job that keeps its checkpoints under one name."""
    path, names_its_step = _below_out(matrix, plan)
    return path if plan.claim is Claim.CONTINUES and not names_its_step else None


def _below_out(matrix: Matrix, plan: Plan) -> tuple[str, bool]:
    """The place below `{out}` of what a plan restores, and whether it is named by its step."""
    restored = plan.restore.restores
    step = restored.step if restored else matrix.job.restore_step
    template = (restored.template if restored else None) or matrix.job.checkpoint
    values = placeholders.placeholder_values(plan.source.topology, out="/", resume=None, step=step)
    path = str(PurePosixPath(placeholders.fill(template, values, "job.checkpoint"))).strip("/")
    return path, "step" in placeholders.used(template)


def _resume_only(job: Job) -> tuple[str, ...]:
    """The arguments that only a resumed run is given, an option together with its value.

    Those with a placeholder tell where the checkpoint is, and those that speak of resuming turn it
    on: no uninterrupted run needs either.
    """
    options: list[list[str]] = []
    for argument in job.resume_args:
        if argument.startswith("-") or not options:
            options.append([])
        options[-1].append(argument)
    texts = [" ".join(option) for option in options]
    return tuple(t for t in texts if not placeholders.used(t) and not _RESUMING.search(t))


def _why(entry: Entry) -> str:
    """Why a step has nothing to show, in words."""
    if entry.state in (StepState.STARTED, StepState.INTERRUPTED):
        return "the run was stopped while this was running"
    return entry.lost or ""


def _write_verdict(run: RunFolder, plan: Plan, verdict: Verdict) -> None:
    expected = {
        "expected": verdict.meets(plan.cell.expect),
        "expectation": to_json(plan.cell.expect),
    }
    # A verdict can be had again from the facts: waiting for the disk takes longer than judging.
    path = run.cell(plan.cell.id) / "verdict.json"
    write_json(path, {**to_json(verdict), **expected}, durable=False)
