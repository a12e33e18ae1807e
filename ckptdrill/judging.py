"""Read the facts of a run, have each cell judged, and write the verdicts down.

The effects around the judge: which records exist, why steps were skipped, what was damaged. The
baseline of every source is judged first, because it is the control of the cells beside it. A stored
run can be judged again at any time, without a launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import PurePosixPath

from ckptdrill import claims, journal, placeholders
from ckptdrill.judge import table
from ckptdrill.judge.evidence import Evidence
from ckptdrill.matrix import Matrix
from ckptdrill.model import (
    Claim,
    Held,
    Job,
    Launch,
    LaunchRecord,
    Plan,
    Reason,
    Verdict,
    VerdictWord,
    from_json,
    to_json,
)
from ckptdrill.store import RunFolder, read_json, read_launch, write_json

# A baseline that is only incomplete says nothing against its neighbours: they have the same gap.
_OWN_MATTER = {Reason.EVIDENCE_MISSING, Reason.NOT_EXERCISED, Reason.NOISY_REFERENCE}


def judge_run(run: RunFolder, matrix: Matrix, plans: Sequence[Plan]) -> tuple[Verdict, ...]:
    """Judge every cell from what is on disk and write `cells/<id>/verdict.json`."""
    skipped = _skipped(run)

    @cache
    def record_of(launch: str, world_size: int) -> LaunchRecord:
        return read_launch(run, launch, world_size)

    def verdict_of(plan: Plan, control_failed: str | None) -> Verdict:
        if plan.through is None:
            return table.judge(evidence_of(plan, control_failed))
        first = verdict_of(replace(plan, restore=plan.through, through=None), control_failed)
        if _broken(first):
            return replace(first, explanation=f"the first resume already: {first.explanation}")
        return table.judge(evidence_of(_second_resume(plan), control_failed))

    def evidence_of(plan: Plan, control_failed: str | None) -> Evidence:
        launches = [step for step in plan.steps if isinstance(step, Launch)]
        records = {each.id: record_of(each.id, each.topology.world_size) for each in launches}
        return _evidence(run, matrix, plan, records, skipped, control_failed)

    controls = {
        plan.baseline.id: _control_failure(verdict_of(_baseline_plan(plan), None))
        for plan in {plan.baseline.id: plan for plan in plans if plan.cell.drilled}.values()
    }
    verdicts = tuple(verdict_of(plan, controls.get(plan.baseline.id)) for plan in plans)
    for plan, verdict in zip(plans, verdicts, strict=True):
        _write_verdict(run, plan, verdict)
    return verdicts


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
        skipped=skipped,
        resume_only=_resume_only(job),
        damage=read_json(damage) if damage is not None and damage.exists() else None,
        exclusions=() if plan.cell.drilled else _exclusions(job.stack, plan),
        control_failed=control_failed,
    )


def _exclusions(stack: str | None, plan: Plan) -> tuple[str, ...]:
    cell = plan.cell
    found = claims.exclusions(stack, cell.source, cell.target, cell.drill)
    return tuple(f"{claim.source.version} documents: “{claim.quote}”" for claim in found)


def _baseline_plan(plan: Plan) -> Plan:
    """The control of a plan as a plan of its own: the same source, restored without a fault."""
    cell = replace(plan.cell, target=plan.cell.source, drill="baseline")
    return Plan(cell, Claim.CONTINUES, plan.source, plan.repeats, plan.baseline, plan.baseline)


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
    step = plan.restore.restores.step if plan.restore.restores else matrix.job.restore_step
    values = placeholders.placeholder_values(plan.source.topology, out="/", resume=None, step=step)
    restored = plan.restore.restores
    template = (restored.template if restored else None) or matrix.job.checkpoint
    if "step" not in placeholders.used(template):
        return ""  # a root of generations: its path does not tell which of them is restored
    path = placeholders.fill(template, values, "job.checkpoint")
    return str(PurePosixPath(path)).strip("/")


def _resume_only(job: Job) -> tuple[str, ...]:
    """The arguments that only a resumed run is given, an option together with its value.

    Those with a placeholder tell where the checkpoint is, which no uninterrupted run needs.
    """
    options: list[list[str]] = []
    for argument in job.resume_args:
        if argument.startswith("-") or not options:
            options.append([])
        options[-1].append(argument)
    told = [option for option in options if not any(placeholders.used(word) for word in option)]
    return tuple(" ".join(option) for option in told)


def _skipped(run: RunFolder) -> Mapping[str, str]:
    return {step: entry.lost for step, entry in journal.replay(run).items() if entry.lost}


def _write_verdict(run: RunFolder, plan: Plan, verdict: Verdict) -> None:
    expected = {
        "expected": verdict.meets(plan.cell.expect),
        "expectation": to_json(plan.cell.expect),
    }
    write_json(run.cell(plan.cell.id) / "verdict.json", {**to_json(verdict), **expected})
