"""A run on failing storage, as the judge sees it: what fired, what was left, what was said."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from ckptdrill import drill
from ckptdrill.judge import storage
from ckptdrill.judge.evidence import Evidence
from ckptdrill.model import Cell, Fact, LaunchRecord, Policy, Reason, Verdict, VerdictWord
from ckptdrill.plan import SharedLaunches
from tests.judge.history import (
    END_STEP,
    ENDED_WELL,
    RESTORE_STEP,
    SAVES,
    WINDOW,
    healthy,
    run,
    telling,
)
from tests.judge.training import Training, topology

ONE_EPOCH = Policy(out_of_scope={"epoch boundary": "the older step lies in the first epoch"})
Edit = Callable[[LaunchRecord], LaunchRecord]


def facts(record: LaunchRecord, *more: dict[str, Any], rank: int = 0) -> LaunchRecord:
    """A record with further facts, in the order given."""
    new = [
        Fact(f.pop("kind"), rank, f.pop("step", 0), {"t": 50.0 + n, **f}, 9000 + line)
        for n, (line, f) in enumerate(enumerate(map(dict, more), len(record.facts)))
    ]
    return telling(record, (*record.facts, *new))


def without(record: LaunchRecord, keep: Callable[[Fact], bool]) -> LaunchRecord:
    return telling(record, filter(keep, record.facts))


FIRED = {"kind": "fault_fired", "step": 8, "fault": "enospc", "path": "a", "operation": "write"}
USAGE = {"kind": "usage", "step": 8, "rss_bytes": 400 << 20, "threads": 3, "saves_in_flight": 0}


def evidence(
    whole: tuple[int, ...] = (4,),
    mixed: tuple[int, ...] = (),
    stalled: Edit = lambda record: record,
    **parameters: Any,
) -> Evidence:
    """The save of step 8 met a full disk and ended the job; `whole` steps restore as they should,
    `mixed` ones restore to something else, the rest was refused.
    """
    place = topology("fsdp2")
    cell = Cell("cell", place, "default", place, "default", "storage-stall", parameters)
    shared = SharedLaunches(
        restore_step=RESTORE_STEP, saves=SAVES[:2], end_step=END_STEP, repeats=1
    )
    plan = drill.load("storage-stall").plan(cell, shared)
    base = healthy()
    records = {**base.evidence.records}
    records[plan.source.id] = facts(records[plan.source.id], USAGE)
    died = without(
        run(dataclasses.replace(plan.stalled, fault=None), Training()),
        lambda f: f.step <= 8 and f.kind != "stopped",
    )
    died = without(died, lambda f: not (f.kind == "save_end" and f.step == 8))
    error = [{"type": "builtins.OSError", "message": "No space left on device"}]
    refusal = {"kind": "refused", "step": 8, "during": "save", "call": "save", "error": error}
    path = f"/run/work/{plan.stalled.id}/out/step-8"
    crash = {"kind": "crashed", "step": 8, "error": error}
    died = facts(died, FIRED, {**refusal, "path": path}, crash, USAGE)
    died = dataclasses.replace(died, ended={**ENDED_WELL, "returncode": 1})
    records[plan.stalled.id] = stalled(died)
    for launch in plan.generations:
        records[launch.id] = restored(launch, whole, mixed)
    return Evidence(
        plan=plan,
        policy=ONE_EPOCH,
        tolerance=base.evidence.tolerance,
        records=records,
        restore_step=RESTORE_STEP,
        start_step=0,
        window=WINDOW,
        saves=SAVES[:2],
        checkpoint_suffix="",
    )


def restored(launch: Any, whole: tuple[int, ...], mixed: tuple[int, ...]) -> LaunchRecord:
    step = launch.restores.step
    record = run(launch, Training(), at=step)
    if step in whole:
        return record
    if step in mixed:
        other = run(launch, Training(), at=step + 1)
        return telling(record, other.facts)
    begun = without(record, lambda f: f.kind in ("started", "process_group", "load_begin"))
    error = [{"type": "builtins.ValueError", "message": "half a file"}]
    refusal = {"kind": "refused", "during": "load", "call": "load", "error": error, "t": 10.0}
    crash = {"kind": "crashed", "error": error, "t": 10.1, "during": "load"}
    record = facts(begun, {**refusal, "path": "/x"}, crash)
    return dataclasses.replace(record, ended={**ENDED_WELL, "returncode": 1})


def judged(**history: Any) -> Verdict:
    return storage.judge(evidence(**history))


def test_a_loud_end_and_a_whole_older_step_is_the_good_outcome() -> None:
    verdict = judged()
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.FELL_BACK)
    assert "step 4" in verdict.explanation
    assert "4 steps are replayed" in verdict.explanation
    assert verdict.numbers["storage"]["surfaced"]
    assert verdict.facts


def test_a_save_that_came_through_is_the_newest_whole_one() -> None:
    assert judged(whole=(4, 8), stalled=survived).reason is Reason.HELD


def survived(record: LaunchRecord) -> LaunchRecord:
    calm = without(record, lambda f: f.kind not in ("refused", "crashed"))
    end = {"kind": "save_end", "step": 8, "call": "save", "took_s": 2.0}
    end["path"] = f"/run/work/{record.launch_id}/out/step-8"
    for rank in record.ranks:
        calm = facts(calm, end, {"kind": "stopped", "step": 13}, rank=rank)
    return dataclasses.replace(calm, ended=ENDED_WELL)


def test_no_write_met_the_stall() -> None:
    verdict = judged(stalled=lambda r: without(r, lambda f: f.kind != "fault_fired"))
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.FAULT_NOT_FIRED)


def test_it_never_ran() -> None:
    verdict = judged(stalled=lambda r: dataclasses.replace(r, ended=None))
    assert verdict.reason is Reason.NOT_RUN


def test_half_a_save_that_loads_is_the_alarm() -> None:
    verdict = judged(mixed=(8,))
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert "step 8" in verdict.explanation


def test_a_save_that_counts_as_done_and_cannot_be_restored() -> None:
    verdict = judged(stalled=survived)
    assert verdict.reason is Reason.UNSAFE_SAVE
    assert "as if all was well" in verdict.explanation


def test_a_step_that_was_never_reached_is_not_held_against_it() -> None:
    full = evidence()
    newest = full.plan.generations[0]
    records = {name: r for name, r in full.records.items() if name != newest.id}
    skipped = {newest.id: "there is no checkpoint at /run/step-8; the folder holds step-4"}
    verdict = storage.judge(dataclasses.replace(full, records=records, skipped=skipped))
    assert verdict.reason is Reason.FELL_BACK


def test_a_run_that_is_not_the_source_over_again_cannot_be_measured() -> None:
    full = evidence()
    stalled = full.plan.stalled
    assert stalled is not None
    other = run(dataclasses.replace(stalled, fault=None), Training(), at=1)  # one step ahead
    kept = without(full.records[stalled.id], lambda f: f.kind != "state")
    drifted = telling(kept, (*kept.facts, *other.of("state")))
    verdict = storage.judge(
        dataclasses.replace(full, records={**full.records, stalled.id: drifted})
    )
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.NOISY_REFERENCE)
    assert "is not the source over again" in verdict.explanation


def test_nothing_whole_is_left() -> None:
    verdict = judged(whole=())
    assert verdict.reason is Reason.UNSAFE_SAVE
    assert "no whole checkpoint is left" in verdict.explanation


def swallowed(record: LaunchRecord) -> LaunchRecord:
    calm = without(record, lambda f: f.kind != "crashed")
    for rank in record.ranks:
        calm = facts(calm, {"kind": "stopped", "step": 13}, rank=rank)
    return dataclasses.replace(calm, ended=ENDED_WELL)


def test_an_exception_that_is_caught_in_silence_has_not_surfaced() -> None:
    verdict = judged(stalled=swallowed)
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.UNSAFE_SAVE)
    assert "nothing was said of it" in verdict.explanation


def test_a_line_in_the_output_is_enough() -> None:
    line = {"kind": "fault_told", "file": "rank0.out", "line": 9, "text": "save failed"}
    assert judged(stalled=lambda r: facts(swallowed(r), line)).word is VerdictWord.PASS


@pytest.mark.parametrize(
    ("usage", "word"),
    [
        ({"saves_in_flight": 1}, "Pass"),
        ({"saves_in_flight": 2}, "Unsupported"),
        ({"rss_bytes": 2 << 30}, "Unsupported"),
    ],
)
def test_saves_must_not_pile_up(usage: dict[str, int], word: str) -> None:
    verdict = judged(stalled=lambda r: facts(r, {**USAGE, **usage}))
    assert verdict.word.value == word, verdict.explanation


def test_a_save_that_its_process_does_not_wait_for_is_lost() -> None:
    begun = {"kind": "save_begin", "step": 12, "call": "async_save", "path": "/out/step-12"}
    ended = {"kind": "uploaded", "step": 13, "path": "/out/step-12", "error": None, "t": 60.0}
    assert judged(stalled=lambda r: facts(swallowed(r), begun)).reason is Reason.UNSAFE_SAVE
    verdict = judged(whole=(4, 8), stalled=lambda r: facts(survived(r), begun))
    assert "still under way" in verdict.explanation
    whole = judged(whole=(4, 8), stalled=lambda r: facts(survived(r), begun, ended))
    assert whole.word is VerdictWord.PASS


def test_a_save_to_memory_is_none() -> None:
    """A framework may pack what it sends to other ranks with the call that writes checkpoints."""
    packed = ({"kind": "save_begin", "step": 8, "call": "torch.save"},) * 2
    history = judged(stalled=lambda r: facts(r, *packed))
    assert (history.word, history.reason) == (VerdictWord.PASS, Reason.FELL_BACK)


def test_only_saves_that_somebody_restores_can_be_missed() -> None:
    later = {"kind": "save_begin", "step": 12, "call": "save", "path": "/out/step-12", "t": 60.0}
    ended = {**later, "kind": "save_end", "took_s": 0.1, "t": 61.0}
    history = judged(whole=(4, 8), stalled=lambda r: facts(survived(r), later, ended))
    assert (history.word, history.reason) == (VerdictWord.PASS, Reason.HELD)
    missed = judged(whole=(4,), stalled=lambda r: facts(r, later, ended))
    assert missed.reason is Reason.FELL_BACK


def test_the_matrix_may_allow_more_saves_in_flight() -> None:
    two = {**USAGE, "saves_in_flight": 2}
    assert judged(stalled=lambda r: facts(r, two), in_flight=2).word is VerdictWord.PASS


def test_a_run_that_hangs_in_a_save_is_no_good_end() -> None:
    def hang(record: LaunchRecord) -> LaunchRecord:
        calm = without(record, lambda f: f.kind not in ("refused", "crashed"))
        return dataclasses.replace(calm, ended={**ENDED_WELL, "timed_out": True})

    verdict = judged(stalled=hang)
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.HUNG)


def test_no_pass_survives_the_loss_of_one_kind_of_fact_of_the_deciding_restore() -> None:
    for kind in ("started", "state", "batch", "stepped", "stopped", "inventory"):
        full = evidence()
        launch = full.plan.generations[-1]
        lacking = without(full.records[launch.id], lambda f, k=kind: f.kind != k)
        records = {**full.records, launch.id: lacking}
        verdict = storage.judge(dataclasses.replace(full, records=records))
        assert verdict.word is not VerdictWord.PASS, kind
