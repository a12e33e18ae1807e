"""The case of one cell: both runs side by side, every row of the inventory, and what explains it.

In order: find the step that was saved and lay the restored run beside the reference there; judge
each item; explain what is broken by what it equals; set aside what the owner declared out of scope
and what follows from it. The rules of `table` then only look at this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptdrill.judge import (
    blame,
    data,
    ending,
    gradients,
    inventory,
    loss,
    otherwise,
    precision,
    progress,
    randomness,
    surroundings,
    timing,
    updates,
)
from ckptdrill.judge import state as states
from ckptdrill.judge.allowed import Allowed
from ckptdrill.judge.ending import End, Ending
from ckptdrill.judge.evidence import Evidence
from ckptdrill.judge.saved_step import step_held
from ckptdrill.judge.trajectory import (
    Pair,
    Trajectory,
    begun_saves,
    local_step_of_save,
    trajectory,
)
from ckptdrill.model import (
    EPOCH_BOUNDARY,
    Check,
    Claim,
    DamageKind,
    Held,
    Item,
    JsonValue,
    LaunchRecord,
    RngPolicy,
)

_ENDED_ON_DAMAGE = {
    End.REFUSED: "the framework noticed and refused it",
    End.CRASHED: "the job stopped on it",
    End.HUNG_IN_RESTORE: "the restore hung on it",
    End.TIMED_OUT: "the job did not come to its end",
    End.DIED: "the job died on it",
}
# A gradient that is another one by declaration counts with these.
_RESTORED = {
    Item.GRADIENTS,
    Item.WEIGHTS,
    Item.BUFFERS,
    Item.MOMENTS,
    Item.HYPERPARAMETERS,
    Item.SCHEDULER,
}
# What other updates make different, and what other batches do, although everything was restored.
OF_THE_UPDATES = {Item.INVENTORY, Item.GRADIENTS, Item.UPDATES, Item.LOSS}
OF_THE_BATCHES = {Item.DATA, *OF_THE_UPDATES}


@dataclass(frozen=True)
class Case:
    """Everything the rules look at."""

    evidence: Evidence
    source: LaunchRecord
    restore: LaunchRecord
    end: Ending
    pair: Pair
    checks: tuple[Check, ...]
    batch_plan: str | None = None
    trains_otherwise: otherwise.Cause | None = None  # what the target topology itself does
    fell_back_to: int | None = None
    noisy: str | None = None
    numbers: Mapping[str, JsonValue] = field(default_factory=dict)

    def having(self, *statuses: Held) -> tuple[Check, ...]:
        """The rows with one of these statuses, in the order of proof."""
        return tuple(check for check in self.checks if check.status in statuses)


def case_of(evidence: Evidence) -> Case:
    """The case of a cell whose source and restored run are there."""
    plan = evidence.plan
    source, restore = evidence.records[plan.source.id], evidence.records[plan.restore.id]
    held = step_held(source, evidence.start_step, evidence.checkpoint_suffix, evidence.restore_step)
    at = evidence.restore_step if held is None else held
    reference = trajectory(source, evidence.start_step)
    pair = Pair(reference, trajectory(restore, at), at, evidence.window)
    end = ending.ending(restore)
    older = {evidence.start_step + step for step in begun_saves(source)}
    if plan.damage is not None and evidence.start_step == 0:
        older.add(0)  # what a job trains from that finds no checkpoint
    back = states.matching_step(
        pair.restored, reference, at, sorted((s for s in older if s < at), reverse=True)
    )
    if back is not None and plan.claim is Claim.DETECTS_DAMAGE:
        pair = Pair(reference, trajectory(restore, back), back, evidence.window)
    noisy = _noise(evidence, pair)
    seen = _gradients(evidence, pair)
    checks = tuple(
        _scoped(blame.explained(check, pair), evidence)
        for check in _checks(evidence, pair, noisy, seen)
    )
    checks = _by_another_argument(_consequences(checks), evidence.resume_only)
    if plan.damage is not None:
        noticed = _framework(evidence.damage or {}, end, back, checks)
        checks = (*checks, surroundings.damage(evidence.damage, noticed))
    control = _control(evidence)
    plan_differs = (
        data.same_as_control(
            pair,
            control,
            plan.source.topology,
            plan.restore.topology,
            evidence.tolerance.loss or evidence.tolerance.noise,
            same_effect=False if seen.differ else seen.same or None,
        )
        if control
        else None
    )
    of_topology = (
        otherwise.cause(seen, pair, control, checks, evidence.policy.approved) if control else None
    )
    return Case(
        evidence,
        source,
        restore,
        end,
        pair,
        checks,
        plan_differs,
        of_topology,
        back,
        noisy,
        {
            **_measured(evidence, source, restore),
            "older_step": back,
            "replayed_steps": None if back is None else at - back,
        },
    )


def _gradients(evidence: Evidence, pair: Pair) -> otherwise.Observed:
    """The first gradients side by side: at another topology than the source's, where updates and
    loss may differ by what that does to them.
    """
    plan, control = evidence.plan, _control(evidence)
    if control is None:
        return otherwise.Observed()
    baseline = evidence.record(plan.baseline.id)
    alike = _repeats(evidence)
    if baseline is not None:
        alike.append(trajectory(baseline, pair.restore_step))
    return otherwise.observed(
        pair,
        control,
        alike,
        _quiet(evidence, pair.restore_step),
        (plan.source.topology, plan.restore.topology),
        evidence.tolerance.safety,
    )


def _quiet(evidence: Evidence, at: int) -> list[Trajectory]:
    """The two restores without random layers, where both have run."""
    records = [evidence.record(launch.id) for launch in evidence.quiet]
    return [trajectory(record, at) for record in records if record is not None]


def _checks(
    evidence: Evidence, pair: Pair, noisy: str | None, seen: otherwise.Observed
) -> tuple[Check, ...]:
    plan = evidence.plan
    control = _control(evidence)
    sampled = states.sampled(pair, evidence.policy.parts, control)
    allowed = _allowed(evidence, pair, noisy, seen)
    same_size = plan.source.topology.world_size == plan.restore.topology.world_size
    policy = evidence.policy
    promised = policy.rng_same_world_size if same_size else policy.rng_other_world_size
    order = data.order(
        pair,
        plan.source.topology,
        plan.restore.topology,
        control,
        epochs_in_scope=EPOCH_BOUNDARY not in evidence.policy.out_of_scope,
        same_effect=seen.same,
    )
    gradient = (otherwise.row(seen, order.status, evidence.policy.approved),) if control else ()
    update = updates.first(pair, allowed, _not_compared(pair, seen) if control else frozenset())
    return (
        states.keys(sampled),
        progress.step(pair, control),
        states.weights(sampled),
        states.buffers(sampled),
        states.moments(sampled),
        states.hyperparameters(sampled, states.freezing(pair)),
        progress.schedule(pair, sampled),
        precision.row(pair, sampled),
        order,
        randomness.random_state(pair, evidence.policy, same_world_size=same_size),
        surroundings.configuration(
            pair,
            evidence.policy,
            same_environment=plan.source.environment == plan.restore.environment,
            resume_only=evidence.resume_only,
        ),
        surroundings.topology(pair, plan),
        inventory.next_save(
            pair,
            allowed,
            random_continues=promised is RngPolicy.CONTINUED,
            data_holds=order.status is Held.HELD,
            rounds=update.status is Held.HELD and update.numbers.get("distance", 0.0) > 0.0,
            other_before=blame.other_before(pair) if update.status is Held.BROKEN else None,
        ),
        *gradient,
        update,
        loss.window(pair, evidence.tolerance, allowed),
    )


def _allowed(
    evidence: Evidence, pair: Pair, noisy: str | None, seen: otherwise.Observed
) -> Allowed:
    """What the bands of a cell are measured from."""
    return Allowed(
        repeats=[*_repeats(evidence), *_other_streams(evidence, pair)],
        control=_control(evidence),
        safety=evidence.tolerance.safety,
        noisy=noisy,
        unmeasured=_unmeasured(evidence, pair),
        loss_ceiling=seen.loss_ceiling,
        update_ceiling=seen.update_ceiling,
    )


def _repeats(evidence: Evidence) -> list[Trajectory]:
    records = [evidence.record(launch.id) for launch in evidence.plan.repeats]
    return [trajectory(record, evidence.start_step) for record in records if record is not None]


def _other_streams(evidence: Evidence, pair: Pair) -> list[Trajectory]:
    """The source with other random numbers after the save, where nothing but those made it another:
    not where they choose the samples, too.
    """
    launch = evidence.plan.other_stream
    record = evidence.record(launch.id) if launch else None
    if record is None:
        return []
    run = trajectory(record, evidence.start_step)
    steps = pair.compared
    same = all(run.row_counts(step) == pair.reference.row_counts(step) for step in steps)
    return [run] if same and not run.lost(run.stepped, steps) else []


def _not_compared(pair: Pair, seen: otherwise.Observed) -> frozenset[str]:
    """Parameters whose first update says nothing at another topology."""
    in_parts = gradients.in_parts(pair.reference) | gradients.in_parts(pair.restored)
    return in_parts | otherwise.negligible(pair, seen)


def _framework(
    record: Mapping[str, JsonValue], end: Ending, back: int | None, checks: Sequence[Check]
) -> str:
    """What the stack and the job made of a damage by themselves, in words."""
    if record.get("selected_step") is not None:
        return "the guard verified before the load, so the framework never saw it"
    if end.how is not End.TRAINED:
        return _ENDED_ON_DAMAGE[end.how]
    if back is not None:
        return f"the job went back to step {back}" if back else "the job began again at step 0"
    if any(check.status is Held.BROKEN for check in checks):
        return "the framework loaded it without a word"
    if record.get("kind") == DamageKind.POINTER:
        return "the job was not misled"
    return "the job trained as if nothing had happened"


def _scoped(check: Check, evidence: Evidence) -> Check:
    """An item the owner declared out of scope is shown as such, with the owner's words."""
    why = evidence.policy.out_of_scope.get(check.item.value)
    if why is None or check.status is Held.HELD:
        return check
    return Check(
        check.item,
        Held.OUT_OF_SCOPE,
        f"declared out of scope: {why} (found: {check.summary})",
        facts=check.facts,
        numbers={**check.numbers, "declared_broken": check.status is Held.BROKEN},
    )


def _consequences(checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """A declared difference makes the updates, the loss and the next save others, too."""
    declared = [c for c in checks if c.status is Held.OUT_OF_SCOPE and c.item in _RESTORED]
    changed = [c for c in declared if c.numbers.get("declared_broken")]
    if not changed:
        return checks
    why = f"follows from what is declared out of scope: {changed[0].item.value}"
    return tuple(
        replace(c, status=Held.OUT_OF_SCOPE, summary=f"{why} (found: {c.summary})")
        if c.status is Held.BROKEN and c.item in OF_THE_UPDATES
        else c
        for c in checks
    )


def _by_another_argument(
    checks: tuple[Check, ...], resume_only: Sequence[str]
) -> tuple[Check, ...]:
    """State that was restored, updates that are others, and an argument that only the resumed run
    has: the argument is to blame, and not what follows from it.
    """
    broken = {check.item for check in checks if check.status is Held.BROKEN}
    if not resume_only or not broken or not broken <= OF_THE_UPDATES:
        return checks
    why = f"the state is restored, but only the resumed run is given `{resume_only[0]}`"
    return tuple(
        replace(check, status=Held.BROKEN, summary=why)
        if check.item is Item.CONFIGURATION and check.status is Held.HELD
        else check
        for check in checks
    )


def _control(evidence: Evidence) -> Trajectory | None:
    """The uninterrupted run at the target topology, if the plan has one and it trained."""
    launch = evidence.plan.control
    record = evidence.record(launch.id) if launch else None
    return trajectory(record, evidence.start_step) if record else None


def _unmeasured(evidence: Evidence, pair: Pair) -> str | None:
    """Which repeat or control was planned and did not record every compared step, in words."""
    planned = (*evidence.plan.repeats, *((evidence.plan.control,) if evidence.plan.control else ()))
    for launch in planned:
        record = evidence.record(launch.id)
        if record is None:
            return evidence.skipped.get(launch.id, f"{launch.id} has not run")
        run = trajectory(record, evidence.start_step)
        lost = run.lost(run.stepped, pair.compared)
        if lost:
            return lost
    return None


def _noise(evidence: Evidence, pair: Pair) -> str | None:
    """Why the source does not repeat itself beyond round-off, if a repeat shows that."""
    for repeat in _repeats(evidence):
        steps = [s for s in pair.compared if s <= repeat.last_step]
        worst = loss.largest_deviation(pair.reference, repeat, steps)
        if worst > evidence.tolerance.noise:
            return (
                f"two runs of the source differ by {worst:.2g} in loss, more than tolerance.noise "
                f"({evidence.tolerance.noise:g})"
            )
    return None


def _measured(
    evidence: Evidence, source: LaunchRecord, restore: LaunchRecord
) -> Mapping[str, JsonValue]:
    """What the ledger counts with. A step is timed at the target topology where a run of the plain
    loop was there: the control, or the source itself.
    """
    plan = evidence.plan
    saved = local_step_of_save(source, evidence.checkpoint_suffix)
    if saved is None:  # written under another name: by the step that the matrix says
        saved = evidence.restore_step - evidence.start_step
    like = plan.source if plan.source.topology.same_layout(plan.restore.topology) else None
    plain = plan.control or like
    return {
        "phases": _phases(evidence, restore),
        "step_s": timing.step_s(evidence.record(plain.id) if plain else None),
        "save": timing.save(source, saved, evidence.start_step),
    }


def _phases(evidence: Evidence, restore: LaunchRecord) -> Mapping[str, JsonValue]:
    """The phases of the restore, after that of the conversion where there was one."""
    found, record = timing.phases(restore), evidence.conversion
    if not found or record is None:
        return found
    return {"conversion": round(float(record["took_s"]), 6), **found}
