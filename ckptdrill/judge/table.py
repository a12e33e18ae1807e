"""From checks to one verdict: the first rule that matches wins, and whatever is unforeseen is
Unproven.

In order: nothing ran; the harness or the source failed; the control of this source does not hold;
the fault never fired; the ranks did different things; the job reads what our copy has not; the
batch plan differs; the target topology trains otherwise; something restored differs; the restore
hung, refused or crashed; evidence is missing, or the reference is noisy; an item was not exercised;
else Pass. Every verdict names one reason, one item or file to blame, and the facts that decided it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptdrill.judge import ends, otherwise, parting, surroundings, versions
from ckptdrill.judge import state as states
from ckptdrill.judge.case import OF_THE_BATCHES, OF_THE_UPDATES, Case, case_of
from ckptdrill.judge.early import before_the_restore
from ckptdrill.judge.ending import End
from ckptdrill.judge.evidence import Evidence
from ckptdrill.model import (
    Check,
    Claim,
    DamageKind,
    Held,
    Item,
    Reason,
    Verdict,
    VerdictWord,
)


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
    early = before_the_restore(evidence)
    if early is not None:
        return early
    case = case_of(evidence)
    rules = _RULES[evidence.plan.claim]
    return next(verdict for rule in rules if (verdict := rule(case)) is not None)


# ------------------------------------------------------------------ rules, in order


def _fault_not_fired(case: Case) -> Verdict | None:
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


def _across_environments(case: Case) -> bool:
    return case.evidence.plan.source.environment != case.evidence.plan.restore.environment


def _not_skewed(case: Case) -> Verdict | None:
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


def _not_moved(case: Case) -> Verdict | None:
    """A restore under the name of the old host shows nothing of a replacement."""
    wanted = case.evidence.plan.restore.host
    seen = {str(fact.data.get("host")) for fact in case.restore.of("started")}
    if wanted is None or seen == {wanted} or not seen:
        return None
    return _verdict(
        case,
        VerdictWord.UNPROVEN,
        Reason.FAULT_NOT_FIRED,
        f"the restore was to see {wanted} as its host and saw {', '.join(sorted(seen))}",
        next(c for c in case.checks if c.item is Item.TOPOLOGY),
        "allow user namespaces, or run where another host name can be given",
    )


def _parted(case: Case) -> Verdict | None:
    """Ranks that went on from different steps: however that ended, it is why."""
    found = parting.parting(case.pair) if case.end.how is not End.TRAINED else None
    if found is None:
        return None
    verdict = _verdict(
        case,
        VerdictWord.UNSUPPORTED,
        Reason.DIVERGED,
        found.text,
        None,
        "let one rank decide what is restored and tell the others, or agree on it before loading",
        subject=f"rank {found.astray[0]}",
    )
    return replace(verdict, blame_item=Item.STEP, facts=found.facts)


def _not_given(case: Case) -> Verdict | None:
    """The job reads a file that its source wrote, and that our copy of the checkpoint has not."""
    file = surroundings.not_given(case.source, case.restore)
    if file is None or case.end.how not in (End.REFUSED, End.CRASHED):
        return None
    return _verdict(
        case,
        VerdictWord.UNPROVEN,
        Reason.HARNESS_ERROR,
        f"the job reads {file}, which the source run wrote beside the checkpoint and the private "
        "copy of it has not",
        None,
        "give job.checkpoint as a list: the path it has, and that of this file, with {step}",
    )


def _hung(case: Case) -> Verdict | None:
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
            case.end.remedy or f"raise job.timeout_s, or {stacks}",
        )
    return None


def _refused(case: Case) -> Verdict | None:
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


def _damage_refused(case: Case) -> Verdict | None:
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


def _crashed(case: Case) -> Verdict | None:
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


def _from_scratch(case: Case) -> Verdict | None:
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


def _fell_back(case: Case) -> Verdict | None:
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


def _batch_plan(case: Case) -> Verdict | None:
    """State and schedule hold, and data and loss differ exactly as the topology
    alone makes them.
    """
    # Other batches are other steps to an epoch: an uninterrupted run there ends like that, too.
    broken = {c.item for c in case.having(Held.BROKEN) if not c.numbers.get("as_control")}
    if case.batch_plan is None or not broken <= OF_THE_BATCHES:
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


def _trains_otherwise(case: Case) -> Verdict | None:
    """The state came back, and the target topology itself makes another training of it."""
    broken = case.having(Held.BROKEN)
    may_be = {*OF_THE_UPDATES, Item.HYPERPARAMETERS, Item.SCHEDULER}
    if not broken or case.trains_otherwise is None or not {c.item for c in broken} <= may_be:
        return None
    rates = {Item.HYPERPARAMETERS, Item.SCHEDULER} & {check.item for check in broken}
    if rates and not case.trains_otherwise.of_rates:
        return None
    row = next((c for c in broken if c.item is Item.GRADIENTS), broken[0])
    topology = case.evidence.plan.restore.topology.short
    return _verdict(
        case,
        VerdictWord.UNSUPPORTED,
        Reason.TRAINS_OTHERWISE,
        f"the state is restored, but {topology} trains otherwise: {case.trains_otherwise.text}",
        row,
        "see where ranks are averaged, counted or normalised over; or approve it "
        f"(policy.approved: {otherwise.RATES if rates else otherwise.GRADIENTS})",
    )


def _diverged(case: Case) -> Verdict | None:
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
        _TO_END if ends.is_end(first) else _DIVERGED_MOVES.get(first.item, ""),
        subject=subject,
    )


def _damage_diverged(case: Case) -> Verdict | None:
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


def _pointer_unheeded(case: Case) -> Verdict | None:
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


def _damage_unseen(case: Case) -> Verdict:
    return _verdict(
        case,
        VerdictWord.UNPROVEN,
        Reason.NOT_EXERCISED,
        "the job trained as if nothing had happened: the damaged bytes do not enter its state",
        None,
        "damage a file or tensor that this job reads",
    )


def _incomplete(case: Case) -> Verdict | None:
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
    compared = len(case.pair.compared)
    if compared < min(case.evidence.window, 2):
        return _verdict(
            case,
            VerdictWord.UNPROVEN,
            Reason.EVIDENCE_MISSING,
            f"after the restore only {_steps(compared)} could be compared",
            None,
            "raise job.window, and let the job train that far",
        )
    open_rows = case.having(Held.NOT_OBSERVED, Held.NOT_EXERCISED)
    return _open(case, open_rows) if open_rows else None


def _open(case: Case, rows: Sequence[Check]) -> Verdict:
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
        first.next_move or _where_to_look(case),
    )


def _where_to_look(case: Case) -> str:
    """What to do about a fact that is missing, and nothing says why."""
    if not case.pair.reference.sample("state", case.pair.restore_step):
        return (
            "state is sampled when every optimizer of the loop has stepped: choose a restore_step "
            f"at which all do, or read launches/{case.source.launch_id}/rank*.err"
        )
    return (
        f"read launches/{case.restore.launch_id}/rank*.err for why it was not recorded, then run "
        "the cell again"
    )


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _held(case: Case) -> Verdict:
    steps = len(case.pair.compared)
    topologies = (
        case.evidence.plan.source.topology.short,
        case.evidence.plan.restore.topology.short,
    )
    return _verdict(
        case,
        VerdictWord.PASS,
        Reason.HELD,
        f"{topologies[0]} -> {topologies[1]} {_how_it_goes_on(case)}: every item in scope held "
        f"at the restore and over {steps} steps"
        + (f" (a note: {case.end.note})" if case.end.note else ""),
        None,
        "",
    )


def _how_it_goes_on(case: Case) -> str:
    """A fresh optimizer that the owner has declared is no continuation, and is not called one."""
    how = next(c for c in case.checks if c.item is Item.TOPOLOGY).numbers.get("mechanism")
    if how == surroundings.Mechanism.WEIGHTS_ONLY:
        return "goes on from the weights alone, with a fresh optimizer as declared"
    return "continues the same training"


def _failed_closed(case: Case) -> Verdict | None:
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


def _went_on(case: Case) -> Verdict:
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
        _not_moved,
        _parted,
        _not_given,
        _batch_plan,
        _trains_otherwise,
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


_DIVERGED_MOVES = {
    Item.STEP: "compare what the script stores as its step with where its loop starts",
    Item.WEIGHTS: "check what the save wrote under these names, key prefixes and strictness of the "
    "load, and what runs after it",
    Item.BUFFERS: "save the buffers, or rebuild non-persistent ones after materialising the model",
    Item.MOMENTS: "load into a template that has the state (get_state_dict materialises it)",
    Item.HYPERPARAMETERS: "restore param_groups after building the optimizer, not before",
    Item.SCHEDULER: "restore the scheduler's state_dict, and let it drive the optimizer that steps",
    Item.PRECISION: "save and restore what this row names: a loss scaler, an average, the extra "
    "state of a layer",
    Item.DATA: "store the sampler's epoch and position, and set both before the first batch",
    Item.INVENTORY: "compare what the script saves under this key with what it puts back",
    Item.RNG: "restore the generators last, after everything that seeds or draws",
    Item.GRADIENTS: "save what the loss depends on and no checkpoint holds",
    Item.UPDATES: "save what the loss or the step depends on and no checkpoint holds",
    Item.LOSS: "save what the loss or the step depends on and no checkpoint holds",
}


_TO_END = (
    "save what decides when training ends: patience, a budget of tokens or time, a count of epochs"
)


def _to_blame(case: Case, broken: Sequence[Check]) -> Check:
    """The first broken row in the order of proof, except that an LR whose schedule is intact is
    the group's, and that a later save in which nothing but weights and moments differs follows
    from the updates.
    """
    # Where training ends otherwise and anything else differs, the end follows from that.
    first = min(broken, key=ends.is_end)
    if first.item is Item.INVENTORY and first.numbers.get("follows"):
        return next(
            (c for c in broken if c.item in (Item.GRADIENTS, Item.UPDATES, Item.LOSS)), first
        )
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


def _stopped_before_training(case: Case) -> bool:
    stopped = case.end.how is End.CRASHED and not case.restore.of("stepped")
    return case.end.how is End.REFUSED or stopped


def _told(case: Case) -> str:
    """The row of the damage: what was done, and who noticed."""
    return next(check.summary for check in case.checks if check.item is Item.DAMAGE)


def _damaged_file(case: Case) -> str:
    return str((case.evidence.damage or {}).get("file", "the checkpoint"))


def _verdict(
    case: Case,
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
