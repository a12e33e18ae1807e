"""From checks to one verdict: the first rule that matches wins, and whatever is unforeseen is
Unproven.

The order is the design's: nothing ran; the harness or the source failed; the control of this source
does not hold; the fault never fired; the restore hung, refused or crashed; something restored
differs;
the batch plan differs; the reference is noisy; evidence is missing; an item was not exercised; else
Pass. Every verdict names one reason, one item or file to blame, and the facts that decided it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptdrill.judge import (
    blame,
    data,
    ending,
    inventory,
    loss,
    precision,
    progress,
    randomness,
    surroundings,
    timing,
    updates,
    versions,
)
from ckptdrill.judge import state as states
from ckptdrill.judge.ending import End, Ending
from ckptdrill.judge.evidence import Evidence
from ckptdrill.judge.trajectory import Pair, Trajectory, local_step_of_save, trajectory
from ckptdrill.model import (
    EPOCH_BOUNDARY,
    Check,
    Claim,
    DamageKind,
    Held,
    Item,
    JsonValue,
    LaunchRecord,
    Reason,
    RngPolicy,
    Verdict,
    VerdictWord,
)


@dataclass(frozen=True)
class _Case:
    """Everything the rules look at."""

    evidence: Evidence
    source: LaunchRecord
    restore: LaunchRecord
    end: Ending
    pair: Pair
    checks: tuple[Check, ...]
    batch_plan: str | None = None
    fell_back_to: int | None = None
    noisy: str | None = None
    numbers: Mapping[str, JsonValue] = field(default_factory=dict)

    def having(self, *statuses: Held) -> tuple[Check, ...]:
        """The rows with one of these statuses, in the order of proof."""
        return tuple(check for check in self.checks if check.status in statuses)


def judge(evidence: Evidence) -> Verdict:
    """The verdict of one cell."""
    return safely(_judge, evidence)


def safely(judging: Callable[[Evidence], Verdict], evidence: Evidence) -> Verdict:
    """What `judging` says. A judge that fails must not pass anything: it says Unproven."""
    try:
        return judging(evidence)
    except Exception as error:  # noqa: BLE001 - a defect of the judge is not evidence
        return Verdict(
            cell_id=evidence.plan.cell.id,
            claim=evidence.plan.claim,
            word=VerdictWord.UNPROVEN,
            reason=Reason.HARNESS_ERROR,
            explanation=f"the judge failed on these facts: {type(error).__name__}: {error}",
            next_move="keep the run folder and report this as a defect of ckptdrill",
        )


def _judge(evidence: Evidence) -> Verdict:
    early = _before_the_restore(evidence)
    if early is not None:
        return early
    case = _case(evidence)
    rules = _RULES[evidence.plan.claim]
    return next(verdict for rule in rules if (verdict := rule(case)) is not None)


# ------------------------------------------------------------------ before there is a restore


def _before_the_restore(evidence: Evidence) -> Verdict | None:
    plan = evidence.plan
    if not plan.cell.drilled:
        return _undrilled(evidence)
    source, restore = evidence.record(plan.source.id), evidence.record(plan.restore.id)
    if source is None:
        why = evidence.skipped.get(plan.source.id, "the source launch has not run")
        return _early(evidence, Reason.NOT_RUN, why, "continue the run with --resume")
    failed = _source_failure(evidence, source)
    if failed:
        return _early(evidence, Reason.SOURCE_FAILED, failed[0], failed[1])
    if plan.damage is not None and evidence.damage is None:
        why = evidence.skipped.get(plan.damage.id, "the damage step has not run")
        return _early(evidence, Reason.FAULT_NOT_FIRED, why, "see journal.jsonl")
    if restore is None:
        why = evidence.skipped.get(plan.restore.id, "the restore launch has not run")
        return _early(evidence, Reason.NOT_RUN, why, "continue the run with --resume")
    if not restore.facts:
        text = ending.ending(restore).text
        return _early(
            evidence,
            Reason.HARNESS_ERROR,
            f"the restore launch recorded nothing: {text}",
            f"read launches/{plan.restore.id}/launcher.err",
        )
    if evidence.control_failed and plan.restore != plan.baseline and not _own_refusal(evidence):
        return _early(
            evidence,
            Reason.CONTROL_FAILED,
            f"the same-topology restore of this source does not hold: {evidence.control_failed}",
            "mend the baseline cell first; nothing can be said of this one before",
        )
    return None


def _undrilled(evidence: Evidence) -> Verdict:
    """Only a document that rules the change out can decide a cell that nobody drills."""
    if not evidence.exclusions:
        why = "no drill was asked for (run: false), and no pinned document rules this change out"
        return _early(evidence, Reason.NOT_RUN, why, "take `run: false` out of the matrix")
    return Verdict(
        cell_id=evidence.plan.cell.id,
        claim=evidence.plan.claim,
        word=VerdictWord.UNSUPPORTED,
        reason=Reason.DOCUMENTED_LIMIT,
        explanation=evidence.exclusions[0],
        next_move="take `run: false` out of the matrix to see what really happens",
    )


def _own_refusal(evidence: Evidence) -> bool:
    """The stack refused this target, and did not refuse the same checkpoint at the source's own
    topology: that stands, whatever else is wrong with the restore there.
    """
    baseline = evidence.record(evidence.plan.baseline.id)
    return (
        evidence.plan.claim is Claim.CONTINUES
        and ending.ending(evidence.records[evidence.plan.restore.id]).how is End.REFUSED
        and baseline is not None
        and ending.ending(baseline).how is End.TRAINED
    )


def _source_failure(evidence: Evidence, source: LaunchRecord) -> tuple[str, str] | None:
    """Why the source run gives no checkpoint and reference, and the next move."""
    folder = f"launches/{evidence.plan.source.id}"
    end = ending.ending(source)
    if end.how is not End.TRAINED:
        return (
            f"the source run failed: {end.text}",
            f"read {folder}/rank0.err and {folder}/launcher.err",
        )
    if not source.of("stepped"):
        return (
            "the source run ended without one training step (an optimizer step after a backward)",
            "check job.args: does the script train under torchrun with these?",
        )
    wanted = evidence.plan.damage or evidence.plan.restore
    lost = evidence.skipped.get(wanted.id, "")
    if "no checkpoint" in lost:
        return (
            f"the source run saved nothing where the matrix says: {lost}",
            "check job.checkpoint and job.saves against what the script writes",
        )
    return None


def _early(evidence: Evidence, reason: Reason, explanation: str, next_move: str) -> Verdict:
    return Verdict(
        cell_id=evidence.plan.cell.id,
        claim=evidence.plan.claim,
        word=VerdictWord.UNPROVEN,
        reason=reason,
        explanation=explanation,
        next_move=next_move,
    )


# ------------------------------------------------------------------ the case


def _case(evidence: Evidence) -> _Case:
    plan = evidence.plan
    source, restore = evidence.records[plan.source.id], evidence.records[plan.restore.id]
    saved_at = local_step_of_save(source, evidence.checkpoint_suffix)
    at = evidence.start_step + saved_at if saved_at is not None else evidence.restore_step
    reference = trajectory(source, evidence.start_step)
    pair = Pair(reference, trajectory(restore, at), at, evidence.window)
    end = ending.ending(restore)
    older = [evidence.start_step + f.step for f in source.of("save_begin")]
    if plan.damage is not None and evidence.start_step == 0:
        older.append(0)  # what a job trains from that finds no checkpoint
    back = states.matching_step(
        pair.restored, reference, at, sorted({s for s in older if s < at}, reverse=True)
    )
    if back is not None and plan.claim is Claim.DETECTS_DAMAGE:
        pair = Pair(reference, trajectory(restore, back), back, evidence.window)
    noisy = _noise(evidence, pair)
    checks = tuple(
        _scoped(blame.explained(check, pair), evidence) for check in _checks(evidence, pair, noisy)
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
        )
        if control
        else None
    )
    return _Case(
        evidence,
        source,
        restore,
        end,
        pair,
        checks,
        plan_differs,
        back,
        noisy,
        {
            **_measured(evidence, source, restore),
            "older_step": back,
            "replayed_steps": None if back is None else at - back,
        },
    )


def _checks(evidence: Evidence, pair: Pair, noisy: str | None) -> tuple[Check, ...]:
    plan = evidence.plan
    sampled, control = states.sampled(pair), _control(evidence)
    unmeasured = _unmeasured(evidence, pair)
    same_size = plan.source.topology.world_size == plan.restore.topology.world_size
    repeats = [
        trajectory(r, evidence.start_step)
        for launch in plan.repeats
        if (r := evidence.record(launch.id)) is not None
    ]
    order = data.order(
        pair,
        plan.source.topology,
        plan.restore.topology,
        control,
        epochs_in_scope=EPOCH_BOUNDARY not in evidence.policy.out_of_scope,
    )
    return (
        states.keys(sampled),
        progress.step(pair),
        states.weights(sampled),
        states.buffers(sampled),
        states.moments(sampled),
        states.hyperparameters(sampled),
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
            repeats,
            control,
            safety=evidence.tolerance.safety,
            random_continues=same_size
            or evidence.policy.rng_other_world_size is RngPolicy.CONTINUED,
            data_holds=order.status is Held.HELD,
        ),
        updates.first(
            pair,
            repeats,
            control,
            safety=evidence.tolerance.safety,
            noisy=noisy,
            unmeasured=unmeasured,
        ),
        loss.window(
            pair,
            repeats,
            control,
            evidence.tolerance,
            noisy,
            unmeasured,
        ),
    )


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
        if c.status is Held.BROKEN and c.item in _OF_THE_UPDATES
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
    if not resume_only or not broken or not broken <= _OF_THE_UPDATES:
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
    for launch in evidence.plan.repeats:
        record = evidence.record(launch.id)
        if record is None:
            continue
        repeat = trajectory(record, evidence.start_step)
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
    like = plan.source if plan.source.topology.same_layout(plan.restore.topology) else None
    plain = plan.control or like
    return {
        "phases": timing.phases(restore),
        "step_s": timing.step_s(evidence.record(plain.id) if plain else None),
        "save": timing.save(source, saved, evidence.start_step),
    }


# ------------------------------------------------------------------ rules, in order


def _fault_not_fired(case: _Case) -> Verdict | None:
    check = next(c for c in case.checks if c.item is Item.DAMAGE)
    if check.status is Held.HELD:
        return None
    return _verdict(
        case,
        VerdictWord.UNPROVEN,
        Reason.FAULT_NOT_FIRED,
        check.summary,
        check,
        "choose another file or tensor for the damage",
    )


def _across_environments(case: _Case) -> bool:
    return case.evidence.plan.source.environment != case.evidence.plan.restore.environment


def _not_skewed(case: _Case) -> Verdict | None:
    """Another environment in which the job imports the same versions is no other version."""
    if not _across_environments(case) or versions.skew(case.source, case.restore).differing:
        return None
    return _verdict(
        case,
        VerdictWord.UNPROVEN,
        Reason.FAULT_NOT_FIRED,
        "both environments came to the same versions of all that the job imports",
        next(c for c in case.checks if c.item is Item.CONFIGURATION),
        "let the two environments differ in a package that the job imports",
    )


def _hung(case: _Case) -> Verdict | None:
    stacks = f"read launches/{case.restore.launch_id}/rank*.stacks"
    if case.end.how is End.HUNG_IN_RESTORE:
        return _verdict(
            case,
            VerdictWord.UNSUPPORTED,
            Reason.HUNG,
            f"the restore hung: {case.end.text}",
            None,
            f"{stacks}; raise job.timeout_s if the storage is that slow",
        )
    if case.end.how is End.TIMED_OUT:
        return _verdict(
            case,
            VerdictWord.UNPROVEN,
            Reason.TIMED_OUT,
            case.end.text,
            None,
            f"raise job.timeout_s, or {stacks}",
        )
    return None


def _refused(case: _Case) -> Verdict | None:
    if case.end.how is not End.REFUSED:
        return None
    return _verdict(
        case,
        VerdictWord.UNSUPPORTED,
        Reason.REFUSED,
        f"the stack refused the restore on {case.end.text}",
        None,
        "the state is safe: convert the checkpoint, or restore at a topology that it supports",
    )


def _damage_refused(case: _Case) -> Verdict | None:
    """An exception before the first step: the undamaged restore of this source raises none."""
    if not _stopped_before_training(case):
        return None
    return _verdict(
        case,
        VerdictWord.UNSUPPORTED,
        Reason.REFUSED,
        f"{_told(case)}; training did not go on: {case.end.text}",
        None,
        "let the job fall back to an older whole checkpoint when one is refused",
        subject=_damaged_file(case),
    )


def _crashed(case: _Case) -> Verdict | None:
    if case.end.how not in (End.CRASHED, End.DIED):
        return None
    return _verdict(
        case,
        VerdictWord.UNPROVEN,
        Reason.CRASHED,
        f"the restored run crashed: {case.end.text}",
        None,
        f"read launches/{case.restore.launch_id}/rank{case.end.rank or 0}.err",
    )


def _from_scratch(case: _Case) -> Verdict | None:
    """No checkpoint was restored, no error was raised, and the training begins again."""
    step = next(c for c in case.checks if c.item is Item.STEP)
    restarted = case.fell_back_to == 0 or (
        step.status is Held.BROKEN and step.numbers.get("gap") == -case.pair.restore_step
    )
    if not restarted:
        return None
    return _verdict(
        case,
        VerdictWord.UNSUPPORTED,
        Reason.DIVERGED,
        f"{surroundings.described(case.evidence.damage or {})}: the job began again at step 0 "
        f"without a word, {case.evidence.restore_step} steps are lost",
        step,
        "stop when a checkpoint is expected and none is found; do not train from scratch",
        subject=_damaged_file(case),
    )


def _fell_back(case: _Case) -> Verdict | None:
    """Under a damage claim a whole older generation, with its full continuity, is the good
    outcome.
    """
    if case.fell_back_to is None or case.having(Held.BROKEN):
        return None
    lost = case.evidence.restore_step - case.fell_back_to
    open_rows = case.having(Held.NOT_OBSERVED, Held.NOT_EXERCISED)
    if open_rows:
        return _open(case, open_rows)
    return _verdict(
        case,
        VerdictWord.PASS,
        Reason.FELL_BACK,
        f"{_told(case)}; training continues "
        f"from the whole checkpoint of step {case.fell_back_to}, {lost} steps are replayed",
        None,
        "",
    )


def _batch_plan(case: _Case) -> Verdict | None:
    """State and schedule hold, and data and loss differ exactly as the topology
    alone makes them.
    """
    broken = {check.item for check in case.having(Held.BROKEN)}
    if case.batch_plan is None or not broken <= _OF_THE_BATCHES:
        return None
    check = next(c for c in case.checks if c.item is Item.DATA)
    return _verdict(
        case,
        VerdictWord.UNSUPPORTED,
        Reason.BATCH_PLAN,
        f"the checkpoint is restored, but the batches are others: {case.batch_plan}",
        check,
        "choose a data-parallel degree that divides the global batch, or declare the new batch "
        "plan",
        subject="batch plan",
    )


def _diverged(case: _Case) -> Verdict | None:
    broken = case.having(Held.BROKEN)
    if not broken:
        return None
    first = _to_blame(case, broken)
    subject = first.subjects[0] if first.subjects else None
    return _verdict(
        case,
        VerdictWord.UNSUPPORTED,
        Reason.DIVERGED,
        "restored without an error, but not the same training: "
        f"{first.item.value}: {first.summary}",
        first,
        _DIVERGED_MOVES.get(first.item, ""),
        subject=subject,
    )


def _damage_diverged(case: _Case) -> Verdict | None:
    broken = case.having(Held.BROKEN)
    if not broken:
        return None
    first = _to_blame(case, broken)
    return _verdict(
        case,
        VerdictWord.UNSUPPORTED,
        Reason.DIVERGED,
        f"{_told(case)}; {first.summary}",
        first,
        "verify checksums before loading (a manifest, or the zip CRCs), and fall back",
        subject=f"{_damaged_file(case)}: {first.subjects[0] if first.subjects else ''}",
    )


def _pointer_unheeded(case: _Case) -> Verdict | None:
    """A job that is not misled has restored the newest whole checkpoint, lie or no lie."""
    if (case.evidence.damage or {}).get("kind") != DamageKind.POINTER:
        return None
    step = case.evidence.restore_step
    return _verdict(
        case,
        VerdictWord.PASS,
        Reason.HELD,
        f"{_told(case)}; training continues from the newest whole checkpoint, that of step {step}",
        None,
        "",
    )


def _damage_unseen(case: _Case) -> Verdict:
    return _verdict(
        case,
        VerdictWord.UNPROVEN,
        Reason.NOT_EXERCISED,
        "the job trained as if nothing had happened: the damaged bytes do not enter its state",
        None,
        "damage a file or tensor that this job reads",
    )


def _incomplete(case: _Case) -> Verdict | None:
    failures = surroundings.observer_failures((case.source, case.restore))
    if failures:
        return _verdict(
            case,
            VerdictWord.UNPROVEN,
            Reason.HARNESS_ERROR,
            f"the observer could not record everything: {failures[0]}",
            None,
            "keep the run folder and report this as a defect of ckptdrill",
        )
    if not case.restore.of("stepped"):
        return _verdict(
            case,
            VerdictWord.UNPROVEN,
            Reason.EVIDENCE_MISSING,
            "the restored job ended by itself without one training step",
            None,
            "does it take the training for finished? Let job.args ask for more steps than the save",
        )
    if len(case.pair.compared) < min(case.evidence.window, 2):
        return _verdict(
            case,
            VerdictWord.UNPROVEN,
            Reason.EVIDENCE_MISSING,
            f"only {len(case.pair.compared)} steps after the restore could be compared",
            None,
            "raise job.window, and let the job train that far",
        )
    open_rows = case.having(Held.NOT_OBSERVED, Held.NOT_EXERCISED)
    return _open(case, open_rows) if open_rows else None


def _open(case: _Case, rows: Sequence[Check]) -> Verdict:
    """An item that was not observed or not exercised makes a Pass impossible."""
    first = min(rows, key=lambda c: (c.status is Held.NOT_EXERCISED, list(Item).index(c.item)))
    noisy = case.noisy and first.item in {Item.UPDATES, Item.LOSS}
    reason = (
        Reason.NOISY_REFERENCE
        if noisy
        else (
            Reason.EVIDENCE_MISSING if first.status is Held.NOT_OBSERVED else Reason.NOT_EXERCISED
        )
    )
    return _verdict(
        case,
        VerdictWord.UNPROVEN,
        reason,
        f"{first.item.value}: {first.summary}",
        first,
        first.next_move
        or f"read launches/{case.restore.launch_id}/rank*.err for why it was not recorded, then "
        "run the cell again",
    )


def _held(case: _Case) -> Verdict:
    steps = len(case.pair.compared)
    topologies = (
        case.evidence.plan.source.topology.short,
        case.evidence.plan.restore.topology.short,
    )
    return _verdict(
        case,
        VerdictWord.PASS,
        Reason.HELD,
        f"{topologies[0]} -> {topologies[1]} continues the same training: every item in scope held "
        f"at the restore and over {steps} steps",
        None,
        "",
    )


def _failed_closed(case: _Case) -> Verdict | None:
    """An exception before the first step is what a changed job owes its owner."""
    if not _stopped_before_training(case):
        return None
    return _verdict(
        case,
        VerdictWord.PASS,
        Reason.FAILED_CLOSED,
        f"the changed job refused to go on: {case.end.text}",
        None,
        "",
    )


def _went_on(case: _Case) -> Verdict:
    changed = " ".join(case.evidence.plan.restore.extra_args)
    broken = case.having(Held.BROKEN)
    first = broken[0] if broken else None
    found = (
        f"{first.item.value}: {first.summary}" if first else "it trained as if nothing was changed"
    )
    return _verdict(
        case,
        VerdictWord.UNSUPPORTED if broken else VerdictWord.UNPROVEN,
        Reason.DIVERGED if broken else Reason.NOT_EXERCISED,
        f"the job changed by `{changed}` restored without a word: {found}",
        first,
        "load strictly, and compare the stored configuration with the job's before training",
    )


_RULES = {
    Claim.CONTINUES: (
        _not_skewed,
        _batch_plan,
        _diverged,
        _hung,
        _refused,
        _crashed,
        _incomplete,
        _held,
    ),
    Claim.FAILS_CLOSED: (_hung, _failed_closed, _crashed, _went_on),
    Claim.DETECTS_DAMAGE: (
        _fault_not_fired,
        _hung,
        _damage_refused,
        _crashed,
        _from_scratch,
        _fell_back,
        _damage_diverged,
        _incomplete,
        _pointer_unheeded,
        _damage_unseen,
    ),
}

_ENDED_ON_DAMAGE = {
    End.REFUSED: "the framework noticed and refused it",
    End.CRASHED: "the job stopped on it",
    End.HUNG_IN_RESTORE: "the restore hung on it",
    End.TIMED_OUT: "the job did not come to its end",
    End.DIED: "the job died on it",
}

_RESTORED = {Item.WEIGHTS, Item.BUFFERS, Item.MOMENTS, Item.HYPERPARAMETERS, Item.SCHEDULER}
# What other updates make different, and what other batches do, although everything was restored.
_OF_THE_UPDATES = {Item.INVENTORY, Item.UPDATES, Item.LOSS}
_OF_THE_BATCHES = {Item.DATA, *_OF_THE_UPDATES}

_DIVERGED_MOVES = {
    Item.STEP: "compare what the script stores as its step with where its loop starts",
    Item.WEIGHTS: "check key prefixes and strictness of the load, and what runs after it",
    Item.BUFFERS: "save the buffers, or rebuild non-persistent ones after materialising the model",
    Item.MOMENTS: "load into a template that has the state (get_state_dict materialises it)",
    Item.HYPERPARAMETERS: "restore param_groups after building the optimizer, not before",
    Item.SCHEDULER: "restore the scheduler's state_dict, and let it drive the optimizer that steps",
    Item.PRECISION: "restore the loss scaler's state_dict",
    Item.DATA: "store the sampler's epoch and position, and set both before the first batch",
    Item.INVENTORY: "compare what the script saves under this key with what it puts back",
    Item.RNG: "restore the generators last, after everything that seeds or draws",
}


def _to_blame(case: _Case, broken: Sequence[Check]) -> Check:
    """The first broken row in the order of proof, except that an LR whose schedule is intact is
    the group's.
    """
    first = broken[0]
    if first.item is Item.SCHEDULER and first.subjects == ("lr",):
        groups = states.group_learning_rates(states.sampled(case.pair))
        if groups:
            return Check(
                Item.HYPERPARAMETERS,
                Held.BROKEN,
                groups[0],
                ("param_groups[*].lr",),
                groups,
                first.facts,
                first.numbers,
            )
    return first


def _stopped_before_training(case: _Case) -> bool:
    stopped = case.end.how is End.CRASHED and not case.restore.of("stepped")
    return case.end.how is End.REFUSED or stopped


def _told(case: _Case) -> str:
    """The row of the damage: what was done, and who noticed."""
    return next(check.summary for check in case.checks if check.item is Item.DAMAGE)


def _damaged_file(case: _Case) -> str:
    return str((case.evidence.damage or {}).get("file", "the checkpoint"))


def _verdict(
    case: _Case,
    word: VerdictWord,
    reason: Reason,
    explanation: str,
    check: Check | None,
    next_move: str,
    subject: str | None = None,
) -> Verdict:
    if subject is None and check is not None and check.subjects:
        subject = check.subjects[0]
    facts = check.facts if check is not None else case.end.facts
    if _across_environments(case):
        explanation += f" ({versions.skew(case.source, case.restore).text})"
    return Verdict(
        cell_id=case.evidence.plan.cell.id,
        claim=case.evidence.plan.claim,
        word=word,
        reason=reason,
        explanation=explanation,
        blame_item=check.item if check else None,
        blame_subject=subject,
        checks=case.checks,
        facts=facts,
        next_move=next_move,
        numbers=case.numbers,
    )
