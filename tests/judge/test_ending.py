"""How a restore ended decides before anything is compared, and exit codes alone prove nothing."""

from typing import Any

import pytest

from ckptdrill.judge.ending import End, cause, ending
from ckptdrill.model import Reason, VerdictWord
from tests.judge.history import WINDOW, History, healthy

WRAPPED = [
    {"type": "torch.distributed.checkpoint.api.CheckpointException", "message": "ranks:[2]"},
    {"type": "builtins.RuntimeError", "message": "size mismatch\nmore", "failed_rank": 2},
    {"type": "builtins.KeyError", "message": "context"},
]


def outcome(history: History) -> tuple[VerdictWord, Reason]:
    verdict = history.verdict()
    return verdict.word, verdict.reason


def test_a_refusal_names_the_earliest_rank_and_the_innermost_cause() -> None:
    verdict = healthy("ddp2", "ddp4").refused(2, 0, 1, 3, error=WRAPPED).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.REFUSED)
    assert "rank 2 in load: RuntimeError: size mismatch" in verdict.explanation
    assert "more" not in verdict.explanation
    assert all("rank2.jsonl" in ref for ref in verdict.facts)
    assert "the state is safe" in verdict.next_move


def test_a_refusal_that_the_job_survived_is_none() -> None:
    """Caught and answered by falling back: the run is judged by what it then does."""
    history = healthy()
    fact = history.fact("refused", t=0.02, during="load", call="load", error=WRAPPED)
    assert history.adding(fact).verdict().word is VerdictWord.PASS


def test_a_rank_that_crashed_because_another_refused_is_still_a_refusal() -> None:
    history = healthy().refused(0, crash=False).ended(returncode=1)
    error = [{"type": "builtins.RuntimeError", "message": "Connection closed by peer"}]
    crash = history.fact("crashed", 1, 11.0, error=error)
    verdict = history.adding(crash).verdict()
    assert verdict.reason is Reason.REFUSED
    assert "shapes do not match" in verdict.explanation


def crashed(*ranks: int, step: int = 0) -> History:
    history = healthy().cut(after=step)
    error = [{"type": "torch.OutOfMemoryError", "message": "no memory"}]
    facts = [
        history.fact("crashed", rank, 10.0 + n, step=step, error=error)
        for n, rank in enumerate(ranks)
    ]
    return history.adding(*facts).ended(returncode=1)


@pytest.mark.parametrize("step", [0, 2])
def test_a_crash_outside_of_loading_proves_nothing(step: int) -> None:
    verdict = crashed(1, 0, step=step).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.CRASHED)
    assert "rank 1: torch.OutOfMemoryError: no memory" in verdict.explanation
    assert "rank1.err" in verdict.next_move


def test_a_refused_load_of_a_later_step_is_a_crash() -> None:
    history = crashed(0, step=2)
    fact = history.fact("refused", t=9.0, step=2, during="load", call="load", error=WRAPPED)
    assert outcome(history.adding(fact)) == (VerdictWord.UNPROVEN, Reason.CRASHED)


def test_a_rank_that_never_comes_back_from_loading_hangs() -> None:
    history = healthy().cut(after=0).without("load_end", rank=1).without("state", "rng", "batch")
    verdict = history.ended(timed_out=True, returncode=None, signal="SIGKILL").verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.HUNG)
    assert "ranks [1] never came back from load" in verdict.explanation
    restore = history.record("restore")
    assert verdict.facts == restore.refs(restore.of("load_begin", 1))
    assert ".stacks" in verdict.next_move


def test_a_time_limit_after_loading_is_no_proof_of_a_hang() -> None:
    verdict = healthy().cut(after=2).ended(timed_out=True, returncode=None).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.TIMED_OUT)
    assert "{0: 2, 1: 2}" in verdict.explanation
    assert "job.timeout_s" in verdict.next_move


def test_a_time_limit_after_the_last_step_is_no_failure() -> None:
    assert healthy().ended(timed_out=True, returncode=None).verdict().word is VerdictWord.PASS


@pytest.mark.parametrize("code", [1, 134])
def test_a_teardown_that_fails_after_the_last_step_is_no_failure(code: int) -> None:
    assert healthy().ended(returncode=code).verdict().word is VerdictWord.PASS


def test_a_program_that_came_to_its_own_end_has_trained() -> None:
    history = healthy()
    ends = [history.fact("exited", rank, step=5, code=0) for rank in (0, 1)]
    assert history.without("stopped").adding(*ends).verdict().word is VerdictWord.PASS


def test_a_rank_that_died_by_a_signal_is_named() -> None:
    history = healthy().cut(after=1).ended(signal="SIGSEGV", returncode=None)
    verdict = history.verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.CRASHED)
    assert "died without an exception" in verdict.explanation
    assert "SIGSEGV" in verdict.explanation


def test_an_exit_code_without_an_exception_is_named() -> None:
    history = healthy().cut(after=0)
    verdict = history.adding(history.fact("exited", 1, code=3)).ended(returncode=1).verdict()
    assert verdict.reason is Reason.CRASHED
    assert "rank 1 exited with code 3" in verdict.explanation


def test_an_error_of_the_cage_is_told() -> None:
    verdict = healthy().cut(after=0).ended(returncode=None, error="no such interpreter").verdict()
    assert "no such interpreter" in verdict.explanation


def test_one_rank_that_did_not_finish_is_enough() -> None:
    verdict = healthy("ddp4").without("stopped", rank=3).verdict()
    assert verdict.word is VerdictWord.UNPROVEN
    assert "ranks [3] died" in verdict.explanation


def test_a_launch_without_an_exit_record_has_not_ended_well() -> None:
    record = healthy().ended(never=True).record("restore")
    assert ending(record).how is End.DIED


@pytest.mark.parametrize(
    ("links", "text"),
    [
        ([{"type": "builtins.ValueError", "message": "a\nb"}], "ValueError: a"),
        ([{"type": "builtins.KeyError", "message": ""}], "KeyError"),
        ([{"type": "a.Outer", "message": "x"}, {"type": "a.Inner", "message": "y"}], "a.Inner: y"),
        (WRAPPED, "RuntimeError: size mismatch"),
    ],
)
def test_the_cause_is_the_innermost_exception(links: list[dict[str, Any]], text: str) -> None:
    assert cause(healthy().fact("crashed", error=links)) == text


def test_a_refusal_outside_torch_names_the_function_that_loads() -> None:
    error = [{"type": "builtins.ValueError", "message": "cannot read format 2"}]
    traceback = '  File "a.py", line 9, in main\n    x\n  File "b.py", line 3, in load_all\n    y\n'
    history = healthy().cut(after=0).without("load_end", "stepped", "batch")
    crash = history.fact("crashed", 0, error=error, traceback=traceback, during="start")
    found = ending(history.adding(crash).ended(returncode=1).record("restore"))
    assert found.how is End.REFUSED
    assert found.text == "rank 0 in load_all: ValueError: cannot read format 2"


LOCK = "/tmp/torch_extensions/py311_cpu/deepspeed_shm_comm/lock"


def compiled(launch: str, *told: tuple[int, str]) -> History:
    """A launch that the time limit ended after ranks told this of an extension."""
    history = healthy()
    empty = history.with_facts(launch, history.record(launch).of("started"))
    facts = [
        history.fact("extension", rank, 1.0 + n, does=does, lock=LOCK)
        for n, (rank, does) in enumerate(told)
    ]
    kept = [*empty.record(launch).facts, *facts]
    ended = empty.record(launch).ended | {"timed_out": True, "returncode": None}
    return empty.with_facts(launch, kept).ended(launch=launch, **ended)


def test_a_lock_that_a_killed_build_left_behind_is_named_with_its_remedy() -> None:
    verdict = compiled("restore", (0, "waits"), (1, "waits")).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.TIMED_OUT)
    assert "ranks [0, 1] waited" in verdict.explanation
    assert "deepspeed_shm_comm" in verdict.explanation
    assert f"remove {LOCK}" in verdict.next_move
    assert "TORCH_EXTENSIONS_DIR" in verdict.next_move
    assert "__compatible_ops__" in verdict.next_move


def test_a_source_that_waits_for_such_a_lock_says_so_too() -> None:
    verdict = compiled("source", (0, "waits")).verdict()
    assert verdict.reason is Reason.SOURCE_FAILED
    assert "was left behind" in verdict.explanation
    assert f"remove {LOCK}" in verdict.next_move


def test_a_build_that_takes_longer_than_the_limit_is_no_lock_left_behind() -> None:
    verdict = compiled("restore", (1, "builds"), (0, "waits")).verdict()
    assert "rank 1 compiled" in verdict.explanation
    assert "remove" not in verdict.next_move
    assert "job.timeout_s" in verdict.next_move


def test_a_build_that_is_done_explains_nothing() -> None:
    told = ((1, "builds"), (0, "waits"), (1, "done"), (0, "done"))
    verdict = compiled("restore", *told).verdict()
    assert "extension" not in verdict.explanation


def over(history: History, last: int = WINDOW) -> History:
    """The restored run knows its last step."""
    return history.edited("started", lambda data: data.update(last_step=last))


def test_what_comes_after_the_last_step_and_its_saves_is_a_note() -> None:
    error = [{"type": "builtins.RuntimeError", "message": "Connection closed by peer"}]
    history = over(healthy().without("stopped", rank=1).ended(returncode=1))
    crash = history.fact("crashed", 1, step=WINDOW, during="train", error=error)
    verdict = history.adding(crash).verdict()
    traced = crash.data | {"traceback": '  File "a.py", line 9, in save_all\n    x\n'}
    saving = history.fact("crashed", 1, step=WINDOW, **traced)
    assert history.adding(saving).verdict().reason is Reason.CRASHED
    assert verdict.word is VerdictWord.PASS
    assert "a note: after its last step rank 1 raised RuntimeError: Conn" in verdict.explanation


def test_a_launch_that_hangs_after_all_its_steps_has_trained() -> None:
    history = over(healthy().without("stopped").ended(returncode=None, timed_out=True))
    verdict = history.verdict()
    assert verdict.word is VerdictWord.PASS
    assert "ranks [0, 1] never ended" in verdict.explanation


def test_a_rank_without_the_last_step_is_not_excused() -> None:
    history = over(healthy().without("stopped").ended(returncode=None, timed_out=True))
    verdict = history.without("stepped", rank=1, step=WINDOW).verdict()
    assert verdict.reason is Reason.TIMED_OUT


def test_a_save_of_the_last_step_that_never_ended_is_not_excused() -> None:
    history = over(healthy().without("stopped").ended(returncode=None, timed_out=True))
    begun = history.fact("save_begin", 1, step=WINDOW, call="save", path="/run/out/step-13")
    assert history.adding(begun).verdict().reason is Reason.TIMED_OUT
    beside = history.fact("save_begin", 1, step=2, call="async_save", path="/run/out/step-10")
    ended = history.fact("save_end", 1, t=11.0, step=2, call="async_save", path="/x", took_s=0.1)
    assert history.adding(beside, ended).verdict().reason is Reason.TIMED_OUT
    uploaded = history.fact("uploaded", 1, t=12.0, step=2, path="/x", error=None)
    assert history.adding(beside, ended, uploaded).verdict().word is VerdictWord.PASS
