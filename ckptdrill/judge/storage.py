"""Judge a run whose storage was slow or failing for a while, by what it did and what it left.

In order: the stall must have fired; the run must not hang in a save; nothing that it left may load
without being whole; something whole must be left, shown by a restore with the full proof of
continuity; what it takes for saved must be whole; no save may be left behind by its process; one
that did not come to be must have been complained of; and saves in the background must not have
piled up. The source run, which is the same without the stall, is the twin: its memory and its saves
in flight are the measure.

A failure has *surfaced* when a rank ended with an exception or an exit code, or when its output
says that a save or a write failed. An exception that the job catches in silence has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ckptdrill.judge import continued, ending
from ckptdrill.judge.continued import concluded
from ckptdrill.judge.ending import End
from ckptdrill.judge.evidence import Evidence
from ckptdrill.model import (
    Check,
    Fact,
    Held,
    Item,
    JsonValue,
    Launch,
    LaunchRecord,
    Reason,
    Verdict,
    VerdictWord,
)

# What makes every cell of a source unjudgeable, whatever this one did.
_NOT_ABOUT_THE_STALL = {Reason.CONTROL_FAILED, Reason.SOURCE_FAILED, Reason.HARNESS_ERROR}
# Memory beyond the twin's that one copy of the state and the allocator may explain.
_MEMORY_FACTOR = 1.5
_MEMORY_SLACK_BYTES = 64 << 20


@dataclass(frozen=True)
class Tried:
    """One restore of what was left: of which saved step, and which step it really continues."""

    launch: Launch
    saved_step: int
    step: int | None
    verdict: Verdict
    refused: bool

    @property
    def whole(self) -> bool:
        """It continues the same training, with all that this proof takes."""
        return self.verdict.word is VerdictWord.PASS


@dataclass(frozen=True)
class _Case:
    evidence: Evidence
    stalled: LaunchRecord
    twin: LaunchRecord
    tried: tuple[Tried, ...]  # newest first

    @property
    def last_step(self) -> int:
        """The last step that the stalled run completed on every rank."""
        reached = self.stalled.last_steps
        return self.evidence.start_step + min(reached.values(), default=0)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.stalled.ranks

    @property
    def newest_whole(self) -> Tried | None:
        return next((each for each in self.tried if each.whole), None)

    @property
    def fired(self) -> tuple[Fact, ...]:
        return self.stalled.of("fault_fired")


def judge(evidence: Evidence) -> Verdict:
    """The verdict of a cell whose plan has a stalled launch and restores of what it left."""
    plan = evidence.plan
    stalled = evidence.record(plan.stalled.id) if plan.stalled else None
    twin = evidence.record(plan.source.id)
    tried = tuple(_tried(evidence, launch) for launch in plan.generations)
    for each in tried:
        if each.verdict.reason in _NOT_ABOUT_THE_STALL:
            return replace(each.verdict, claim=plan.claim)
    if stalled is None or twin is None:
        return concluded(evidence, Reason.NOT_RUN, _why_not(evidence), "continue with --resume")
    case = _Case(evidence, stalled, twin, tried)
    found = next(verdict for rule in _RULES if (verdict := rule(case)) is not None)
    shown = case.newest_whole or (tried[0] if tried else None)
    checks = shown.verdict.checks if shown else ()
    return replace(
        found,
        checks=(*checks, _row(case)),
        facts=found.facts or case.stalled.refs(case.fired[:3]),
        numbers={**(shown.verdict.numbers if shown else {}), "storage": _numbers(case)},
    )


def _why_not(evidence: Evidence) -> str:
    plan = evidence.plan
    named = plan.stalled.id if plan.stalled else ""
    return evidence.skipped.get(named, "the stalled launch has not run")


def _tried(evidence: Evidence, launch: Launch) -> Tried:
    """One restore, judged as a continuation of the saved step, or of an older one behind it."""
    saved = launch.restores.step if launch.restores else evidence.restore_step
    skipped = evidence.skipped.get(launch.id, "")
    if "no checkpoint" in skipped:
        nothing = concluded(evidence, Reason.NOT_RUN, skipped, "")
        return Tried(launch, saved, None, nothing, refused=True)
    found = continued.continued(evidence, launch, [s for s in evidence.saves if s <= saved])
    return Tried(launch, saved, found.step, found.verdict, found.refused)


# --------------------------------------------------------------------------------------------------
# Rules, in order


def _not_fired(case: _Case) -> Verdict | None:
    if case.fired:
        return None
    return concluded(
        case.evidence,
        Reason.FAULT_NOT_FIRED,
        "no write of the job met the stall",
        "let the stall begin at a step that is saved; files that native code writes by itself, "
        "other than torch.save, are not reached",
    )


def _not_repeated(case: _Case) -> Verdict | None:
    return continued.not_repeated(case.evidence, case.stalled)


def _hung(case: _Case) -> Verdict | None:
    end = ending.ending(case.stalled)
    if end.how not in (End.TIMED_OUT, End.HUNG_IN_RESTORE):
        return None
    waiting = [f for f in _begun(case.stalled) if not _has_ended(case.stalled, f)]
    stacks = f"read launches/{case.stalled.launch_id}/rank*.stacks"
    if not waiting:
        return concluded(case.evidence, Reason.TIMED_OUT, end.text, stacks)
    return concluded(
        case.evidence,
        Reason.HUNG,
        f"the run hung: rank {waiting[0].rank} never came back from {waiting[0].data['call']} of "
        f"step {case.evidence.start_step + waiting[0].step}, although storage had recovered",
        f"let a failed save end on every rank; {stacks}",
    )


def _half_written(case: _Case) -> Verdict | None:
    wrong = [each for each in case.tried if each.verdict.reason is Reason.DIVERGED]
    if not wrong:
        return None
    return replace(
        concluded(
            case.evidence,
            Reason.DIVERGED,
            f"what was left of step {wrong[0].saved_step} is loaded without a word: "
            f"{wrong[0].verdict.explanation}",
            "write beside the old checkpoint, and rename when all of it is on storage",
        ),
        blame_item=wrong[0].verdict.blame_item,
        blame_subject=wrong[0].verdict.blame_subject,
    )


def _taken_for_saved(case: _Case) -> Verdict | None:
    for each in case.tried:
        if each.refused and _believed_saved(case, each.saved_step):
            return concluded(
                case.evidence,
                Reason.UNSAFE_SAVE,
                f"every save call of step {each.saved_step} returned as if all was well, and what "
                f"it left cannot be restored: {each.verdict.explanation}",
                "check what the write and the flush returned before a step counts as saved",
            )
    return None


def _nothing_whole(case: _Case) -> Verdict | None:
    if not all(each.refused for each in case.tried):
        return None
    return concluded(
        case.evidence,
        Reason.UNSAFE_SAVE,
        "no whole checkpoint is left: neither the stalled save nor an older one can be restored",
        "keep the old checkpoint until the new one is whole",
    )


def _unjudged(case: _Case) -> Verdict | None:
    """The newest restore that was not refused decides; where it proves nothing, nothing is."""
    deciding = next(each for each in case.tried if not each.refused)
    if deciding.whole:
        return None
    return replace(deciding.verdict, claim=case.evidence.plan.claim)


def _outlived(case: _Case) -> Verdict | None:
    """A save in the background that its process did not wait for is lost, whatever it returned."""
    begun = [f for f in _begun(case.stalled) if f.data["call"] == "async_save"]
    left = [f for f in begun if not _has_ended(case.stalled, f)]
    if not left or case.stalled.of("crashed"):
        return None
    return concluded(
        case.evidence,
        Reason.UNSAFE_SAVE,
        f"rank {left[0].rank} ended while its save of step "
        f"{case.evidence.start_step + left[0].step} was still under way",
        "wait for the last asynchronous save before the process ends",
    )


def _silent(case: _Case) -> Verdict | None:
    failed = [f for f in case.fired if f.data["fault"] != "slow"]
    lost = [each for each in case.tried if each.refused and each.saved_step <= case.last_step]
    if not failed or not lost or _surfaced(case.stalled):
        return None
    return concluded(
        case.evidence,
        Reason.UNSAFE_SAVE,
        f"the save of step {lost[0].saved_step} failed, and nothing was said of it: no exception "
        "ended the job, and its output does not mention a failure",
        "let the job end, or at least log, when a save fails; ask for the result of an "
        "asynchronous one",
    )


def _piled_up(case: _Case) -> Verdict | None:
    now, before = _peak(case.stalled), _peak(case.twin)
    allowed = int(case.evidence.plan.cell.parameters.get("in_flight", 1))
    if now.get("saves_in_flight", 0) > max(allowed, before.get("saves_in_flight", 0)):
        text = f"{now['saves_in_flight']} saves were in flight at once, {allowed} are allowed"
    elif now and before and now["rss_bytes"] > _most_memory(before["rss_bytes"]):
        grown, was = now["rss_bytes"] / 2**20, before["rss_bytes"] / 2**20
        text = f"memory grew to {grown:.0f} MiB while storage stalled, {was:.0f} MiB without"
    else:
        return None
    return concluded(
        case.evidence,
        Reason.UNSAFE_SAVE,
        f"saves pile up: {text}",
        "wait for the save before it, or skip one, while storage is slow",
    )


def _kept(case: _Case) -> Verdict:
    whole = case.newest_whole
    step = whole.step if whole and whole.step is not None else case.evidence.restore_step
    attempted = max(filter(_looked_at(case), _saved_steps(case)), default=step)
    lost = max(case.last_step - step, 0)
    newest = step >= attempted
    said = "" if newest else "; the failure surfaced"
    return concluded(
        case.evidence,
        Reason.HELD if newest else Reason.FELL_BACK,
        f"{_met(case)}; the newest whole checkpoint is that of step {step}, and training continues "
        f"from it{said}, {lost} steps are replayed",
        "",
    )


_RULES = (
    _not_fired,
    _not_repeated,
    _hung,
    _half_written,
    _nothing_whole,
    _taken_for_saved,
    _outlived,
    _silent,
    _piled_up,
    _unjudged,
    _kept,
)


# --------------------------------------------------------------------------------------------------
# What the facts say


def _saved_steps(case: _Case) -> Iterator[int]:
    """The job's steps at which saves have begun."""
    return (case.evidence.start_step + f.step for f in case.stalled.of("save_begin"))


def _looked_at(case: _Case) -> Callable[[int], bool]:
    """True for a step up to the newest that is restored; for any where the job itself chooses."""
    restored = [launch.restores for launch in case.evidence.plan.generations if launch.restores]
    if any(each.template is not None for each in restored):
        return lambda _: True
    newest = max((each.step for each in restored), default=0)
    return lambda step: step <= newest


def _begun(record: LaunchRecord) -> list[Fact]:
    """Saves to storage that have begun; one that names no path went to memory."""
    return [f for f in record.of("save_begin") if record.path(f)]


def _has_ended(record: LaunchRecord, begun: Fact) -> bool:
    """A call has returned or raised; one in the background has been carried out or has failed."""
    done = "uploaded" if begun.data["call"] == "async_save" else "save_end"
    return any(
        f.rank == begun.rank
        and record.t(f) >= record.t(begun)
        and record.path(f) == record.path(begun)
        for kind in (done, "refused")
        for f in record.of(kind)
    )


def _believed_saved(case: _Case, step: int) -> bool:
    """Every call that saved `step` returned, and no rank was told of a failure."""
    local = step - case.evidence.start_step
    begun = [f for f in _begun(case.stalled) if f.step == local]
    path = case.stalled.path
    paths = {path(f) for f in begun}
    told = [f for f in case.stalled.of("refused") if path(f) in paths]
    told += [
        f for f in case.stalled.of("uploaded") if path(f) in paths and f.data["error"] is not None
    ]
    return bool(begun) and not told and all(_has_ended(case.stalled, f) for f in begun)


def _surfaced(record: LaunchRecord) -> bool:
    """An exception or an exit code ended a rank, or its output tells of the failure."""
    codes = [f for f in record.of("exited") if f.data.get("code") != 0]
    ended = ending.ending(record).how is not End.TRAINED
    return bool(record.of("crashed") or codes or record.of("fault_told") or ended)


def _peak(record: LaunchRecord) -> Mapping[str, int]:
    """The largest value of each measure over all ranks and steps; empty when none was recorded."""
    facts = record.of("usage")
    names = ("rss_bytes", "threads", "saves_in_flight")
    return {name: max(int(f.data[name]) for f in facts) for name in names} if facts else {}


def _most_memory(undisturbed_bytes: int) -> float:
    return undisturbed_bytes * _MEMORY_FACTOR + _MEMORY_SLACK_BYTES


def _longest_save_s(record: LaunchRecord) -> float:
    return max(map(record.took_s, record.of("save_end")), default=0.0)


def _met(case: _Case) -> str:
    first = case.fired[0]
    ranks = sorted({f.rank for f in case.fired})
    return (
        f"{len(case.fired)} writes of ranks {ranks} met {first.data['fault']}, first at step "
        f"{case.evidence.start_step + first.step}"
    )


def _row(case: _Case) -> Check:
    """The stall as a row of the inventory: what it met, and what it did to the run."""
    if not case.fired:
        return Check(Item.DAMAGE, Held.NOT_EXERCISED, "no write of the job met the stall")
    now, before = _peak(case.stalled), _peak(case.twin)
    measures = tuple(
        f"{name}: at most {now[name]}, undisturbed {before[name]}" for name in now if name in before
    )
    took = f"longest save call: {_longest_save_s(case.stalled):.2f} s, undisturbed "
    restores = tuple(
        f"restore of step {each.saved_step}: {each.verdict.word.value} {each.verdict.reason.value}"
        for each in case.tried
    )
    return Check(
        Item.DAMAGE,
        Held.HELD,
        _met(case),
        details=(f"{took}{_longest_save_s(case.twin):.2f} s", *measures, *restores),
        facts=case.stalled.refs(
            (*case.fired[:3], *case.stalled.of("fault_told")[:1], *_ends(case))
        ),
    )


def _ends(case: _Case) -> tuple[Fact, ...]:
    return (*case.stalled.of("crashed")[:1], *case.stalled.of("exited")[:1])


def _numbers(case: _Case) -> Mapping[str, JsonValue]:
    whole = case.newest_whole
    return {
        "fired": len(case.fired),
        "last_step": case.last_step,
        "restored_step": whole.step if whole else None,
        "lost_steps": case.last_step - whole.step if whole and whole.step is not None else None,
        "surfaced": _surfaced(case.stalled),
        "longest_save_s": _longest_save_s(case.stalled),
        "longest_save_undisturbed_s": _longest_save_s(case.twin),
        "peak": dict(_peak(case.stalled)),
        "peak_undisturbed": dict(_peak(case.twin)),
    }
