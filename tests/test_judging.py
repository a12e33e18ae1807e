"""From a run folder to verdicts: facts are read, baselines judged first, verdicts written down."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import drill, fact_files, journal
from ckptdrill.journal import StepState
from ckptdrill.judge import trajectory
from ckptdrill.judging import judge_run, stored_plans
from ckptdrill.matrix import Matrix
from ckptdrill.model import (
    Environment,
    Expectation,
    Fact,
    Item,
    Job,
    Plan,
    Reason,
    Tolerance,
    Verdict,
    VerdictWord,
    from_json,
    to_json,
)
from ckptdrill.plan import SharedLaunches
from ckptdrill.store import RunFolder, read_json, write_json
from tests.judge import history as histories
from tests.judge.history import DECLARED, RESTORE_STEP, SAVES, WINDOW, History, damaged, healthy
from tests.judge.training import Training


def matrix(resume_args: tuple[str, ...] = ()) -> Matrix:
    job = Job(
        program="/jobs/train.py",
        module=None,
        args=(),
        resume_args=resume_args,
        checkpoint="{out}/step-{step}",
        saves=SAVES,
        restore_step=RESTORE_STEP,
        window=WINDOW,
        cwd="/",
    )
    return Matrix(
        name="quick",
        path=Path("quick.yaml"),
        text=b"",
        job=job,
        environments={"default": Environment("default", "/usr/bin/python3")},
        topologies={},
        tolerance=Tolerance(),
        policy=DECLARED,
        repeats=1,
        cells=(),
    )


def named(history: History, name: str, **cell: Any) -> History:
    """The same history as a cell of that name, with a restore of its own."""
    plan, records = history.evidence.plan, dict(history.evidence.records)
    restore = plan.restore
    if restore != plan.baseline:
        restore = dataclasses.replace(restore, id=f"restore.{name}")
        record = records.pop(plan.restore.id)
        records[restore.id] = dataclasses.replace(record, launch_id=restore.id)
    changed = dataclasses.replace(plan.cell, id=name, **cell)
    return history.given(
        plan=dataclasses.replace(plan, cell=changed, restore=restore), records=records
    )


def on_disk(root: Path, *histories: History) -> tuple[RunFolder, tuple[Plan, ...]]:
    """A run folder as the cages, observers and the schedule leave it."""
    run = RunFolder(root)
    for history in histories:
        plan = history.evidence.plan
        write_json(run.cell(plan.cell.id) / "plan.json", to_json(plan))
        if plan.damage is not None and history.evidence.damage is not None:
            write_json(run.damage(plan.damage.id), history.evidence.damage)
        for name, record in history.evidence.records.items():
            if run.launch(name).exists():
                continue
            run.launch(name).mkdir(parents=True)
            for rank in range(record.world_size):
                lines = [_line(fact) for fact in record.facts if fact.rank == rank]
                (run.launch(name) / f"rank{rank}.jsonl").write_text("".join(lines))
            if record.ended is not None:
                write_json(run.launch(name) / "exit.json", record.ended)
    return run, tuple(history.evidence.plan for history in histories)


def _line(fact: Fact) -> str:
    """What the observer writes: what is a launch's own stands first."""
    data = dict(fact.data)
    head = {"fact": fact.kind, "t": data.pop("t"), "rank": fact.rank, "step": fact.step}
    own = {name: data.pop(name) for name in ("took_s", "path") if name in data}
    return json.dumps({**head, **own, **data}, separators=(",", ":")) + "\n"


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of lines need not be on the platter here."""
    monkeypatch.setattr("os.fsync", lambda _: None)


BASELINE = named(healthy("fsdp2"), "a-baseline")
SHRUNK = named(healthy("fsdp2", "ddp1"), "b-shrunk")


def documented(stack: str | None) -> Matrix:
    return dataclasses.replace(matrix(), job=dataclasses.replace(matrix().job, stack=stack))


@pytest.mark.parametrize(
    ("stack", "word", "reason"),
    [
        ("deepspeed-native", VerdictWord.UNSUPPORTED, Reason.DOCUMENTED_LIMIT),
        ("dcp-fsdp2", VerdictWord.UNPROVEN, Reason.NOT_RUN),
        (None, VerdictWord.UNPROVEN, Reason.NOT_RUN),
    ],
)
def test_a_document_decides_only_what_nobody_drills(
    tmp_path: Path, stack: str | None, word: VerdictWord, reason: Reason
) -> None:
    left_out = named(SHRUNK, "c-left-out", drilled=False)
    run, plans = on_disk(tmp_path, BASELINE, SHRUNK, left_out)
    verdicts = judge_run(run, documented(stack), plans)
    assert [v.word for v in verdicts[:2]] == [VerdictWord.PASS] * 2
    assert (verdicts[2].word, verdicts[2].reason) == (word, reason)
    if word is VerdictWord.UNSUPPORTED:
        assert "deepspeed 0.19.8 documents: “Automatic adjustment" in verdicts[2].explanation


def test_a_cell_that_nobody_drills_is_no_control_of_others(tmp_path: Path) -> None:
    left_out = named(BASELINE, "c-left-out", drilled=False)
    run, plans = on_disk(tmp_path, SHRUNK, left_out)
    assert judge_run(run, documented("dcp-fsdp2"), plans)[0].word is VerdictWord.PASS


def test_a_stored_run_gives_the_verdicts_of_its_facts(tmp_path: Path) -> None:
    run, plans = on_disk(tmp_path, BASELINE, SHRUNK)
    verdicts = judge_run(run, matrix(), plans)
    assert [v.word for v in verdicts] == [VerdictWord.PASS] * 2
    assert [v.cell_id for v in verdicts] == ["a-baseline", "b-shrunk"]
    assert [v.explanation for v in verdicts] == [
        h.verdict().explanation for h in (BASELINE, SHRUNK)
    ]


def test_verdicts_are_written_beside_their_cells(tmp_path: Path) -> None:
    expected = Expectation(VerdictWord.UNSUPPORTED, Reason.REFUSED, "known")
    run, plans = on_disk(tmp_path, BASELINE, named(SHRUNK, "b-shrunk", expect=expected))
    verdicts = judge_run(run, matrix(), plans)
    stored = [read_json(run.cell(v.cell_id) / "verdict.json") for v in verdicts]
    assert [from_json(Verdict, each).word for each in stored] == [v.word for v in verdicts]
    assert [each["expected"] for each in stored] == [True, False]
    assert stored[1]["expectation"]["why"] == "known"


def test_every_fact_that_a_stored_verdict_cites_is_a_line_of_the_run(tmp_path: Path) -> None:
    run, plans = on_disk(tmp_path, BASELINE, SHRUNK)
    for verdict in judge_run(run, matrix(), plans):
        for ref in {ref for check in verdict.checks for ref in check.facts}:
            file, line = ref.rsplit(":", 1)
            assert 1 <= int(line) <= len((run.root / file).read_text().splitlines())


def test_judging_again_needs_the_folder_only_and_changes_nothing(tmp_path: Path) -> None:
    run, plans = on_disk(tmp_path, BASELINE, SHRUNK)
    first = judge_run(run, matrix(), plans)
    before = (run.cell("b-shrunk") / "verdict.json").read_bytes()
    assert stored_plans(run) == plans
    assert judge_run(run, matrix(), stored_plans(run)) == first
    assert (run.cell("b-shrunk") / "verdict.json").read_bytes() == before


def test_a_baseline_that_does_not_hold_leaves_its_cells_unproven(tmp_path: Path) -> None:
    broken = named(BASELINE.differs("weights", "mix.weight"), "a-baseline")
    run, plans = on_disk(tmp_path, broken, SHRUNK)
    verdicts = judge_run(run, matrix(), plans)
    assert [v.reason for v in verdicts] == [Reason.DIVERGED, Reason.CONTROL_FAILED]
    assert "mix.weight differs" in verdicts[1].explanation


def test_the_baseline_counts_even_where_no_cell_asks_for_it(tmp_path: Path) -> None:
    run, plans = on_disk(tmp_path, SHRUNK.ended("baseline", never=True))
    assert judge_run(run, matrix(), plans)[0].reason is Reason.CONTROL_FAILED


def test_a_baseline_with_less_evidence_is_its_own_matter(tmp_path: Path) -> None:
    thin = named(BASELINE.without("rng"), "a-baseline")
    run, plans = on_disk(tmp_path, thin, SHRUNK)
    verdicts = judge_run(run, matrix(), plans)
    assert (verdicts[0].word, verdicts[0].blame_item) == (VerdictWord.UNPROVEN, Item.RNG)
    assert verdicts[1].word is VerdictWord.PASS


def test_why_a_step_never_ran_comes_from_the_journal(tmp_path: Path) -> None:
    history = SHRUNK.ended(never=True)
    run, plans = on_disk(tmp_path, BASELINE, history)
    restore = history.evidence.plan.restore.id
    journal.record(run, restore, StepState.SKIPPED, "no room for 1 rank")
    verdict = judge_run(run, matrix(), plans)[1]
    assert (verdict.reason, verdict.explanation) == (Reason.NOT_RUN, "no room for 1 rank")


@pytest.mark.parametrize("cut", ["source", "repeats", "baseline", "restore", "damage"])
def test_a_cell_of_which_any_step_was_left_out_has_not_run(tmp_path: Path, cut: str) -> None:
    """However much else is there: what a time budget cut off is never a Pass, nor a failure."""
    run, plans = on_disk(tmp_path, BASELINE, damaged())
    assert judge_run(run, matrix(), plans)[1].reason is not Reason.NOT_RUN
    step = getattr(plans[1], cut)
    step_id = step[0].id if isinstance(step, tuple) else step.id
    journal.record(run, step_id, StepState.LEFT_OUT, "the time budget of 9 s was used up")
    verdict = judge_run(run, matrix(), plans)[1]
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.NOT_RUN)
    assert "the time budget of 9 s was used up" in verdict.explanation


@pytest.mark.parametrize("cut", ["source", "restore"])
@pytest.mark.parametrize("state", [StepState.STARTED, StepState.INTERRUPTED])
def test_what_was_cut_down_with_the_run_has_not_run(
    tmp_path: Path, cut: str, state: StepState
) -> None:
    """The cage of a killed runner ends its launch and still writes how: that is no verdict."""
    run, plans = on_disk(tmp_path, BASELINE, SHRUNK.ended(error="terminated"))
    plan = plans[1]
    for step in plan.steps:
        journal.record(run, step.id, StepState.STARTED)
        journal.record(run, step.id, StepState.ENDED)
    assert judge_run(run, matrix(), plans)[1].reason is not Reason.NOT_RUN
    journal.record(run, getattr(plan, cut).id, state)
    verdict = judge_run(run, matrix(), plans)[1]
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.NOT_RUN)
    assert verdict.explanation == "the run was stopped while this was running"
    assert "--resume" in verdict.next_move


def test_a_torn_fact_is_a_missing_fact(tmp_path: Path) -> None:
    run, plans = on_disk(tmp_path, BASELINE)
    path = run.launch("restore.fsdp2.baseline") / "rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert judge_run(run, matrix(), plans)[0].word is VerdictWord.UNPROVEN


def test_the_record_of_a_damage_is_read(tmp_path: Path) -> None:
    history = damaged().differs("weights", "embed.weight")
    run, plans = on_disk(tmp_path, history)
    verdict = judge_run(run, matrix(), plans)[0]
    assert (verdict.reason, verdict.blame_subject) == (
        Reason.DIVERGED,
        "__0_0.distcp: embed.weight",
    )
    run.damage("damage.cell").unlink()
    assert judge_run(run, matrix(), plans)[0].reason is Reason.FAULT_NOT_FIRED


def test_a_baseline_that_crashed_is_no_control(tmp_path: Path) -> None:
    crashed = SHRUNK.without("state", "stopped", launch="baseline").ended("baseline", returncode=1)
    run, plans = on_disk(tmp_path, crashed)
    assert judge_run(run, matrix(), plans)[0].reason is Reason.CONTROL_FAILED


def test_arguments_that_only_a_resumed_run_gets_are_known_to_the_judge(tmp_path: Path) -> None:
    resume_args = ("--auto-resume", "--dropout", "0.3", "--strict", "--from={resume}")
    run, plans = on_disk(tmp_path, BASELINE)
    verdict = judge_run(run, matrix(resume_args), plans)[0]
    row = next(check for check in verdict.checks if check.item is Item.CONFIGURATION)
    assert row.subjects == ("--dropout 0.3", "--strict")


def test_a_verdict_is_the_same_whatever_was_judged_before_it(tmp_path: Path) -> None:
    """Launches that recorded the same share what follows from it, and nothing else."""
    plain = healthy("fsdp2", "fsdp4")
    cells = [
        named(plain, "a-healthy"),
        named(plain, "b-alike"),
        named(plain.differs("weights", "mix.weight", rank=1), "c-weights"),
        named(plain.edited("rng", lambda rng: rng["kinds"].update(python="0")), "d-rng"),
        named(plain.without("batch", rank=1), "e-lost"),
        named(plain.ended(returncode=1).without("stopped"), "f-cut"),
        named(plain.adding(plain.fact("observer_failed", **FAILED)), "g-failed"),
        named(plain.refused(0), "h-refused"),
        named(plain.edited("stepped", _twice_the_loss), "i-loss"),
    ]
    alone = [
        to_json(judge_run(*_judged_alone(tmp_path / f"alone{n}", cell))[0])
        for n, cell in enumerate(cells)
    ]
    assert len({json.dumps(verdict["explanation"]) for verdict in alone}) > 4
    for name, order in (("forth", 1), ("back", -1)):
        run, plans = on_disk(tmp_path / name, *cells[::order])
        assert [to_json(v) for v in judge_run(run, matrix(), plans)][::order] == alone
        one, other = (
            fact_files.read_launch(run, plan.restore.id, 4) for plan in plans[::order][:2]
        )
        assert one.common is other.common


FAILED = {"where": "state", "error": [{"type": "builtins.ValueError", "message": "no room"}]}


def _twice_the_loss(stepped: dict[str, Any]) -> None:
    stepped["losses"] = [2 * loss for loss in stepped["losses"]]


def _judged_alone(root: Path, cell: History) -> tuple[RunFolder, Matrix, tuple[Plan, ...]]:
    """A run of one cell, and nothing known of any launch."""
    for kept in (fact_files._moulds, fact_files._common, trajectory._side_by_side):
        kept.cache_clear()
    run, plans = on_disk(root, cell)
    return run, matrix(), plans


@pytest.mark.e2e
def test_cells_divided_among_processes_get_the_same_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [named(healthy("fsdp2", "ddp1"), f"cell-{n}") for n in range(5)]
    run, plans = on_disk(tmp_path, BASELINE, *cells)
    alone = judge_run(run, matrix(), plans)
    written = [read_json(run.cell(plan.cell.id) / "verdict.json") for plan in plans]
    monkeypatch.setattr("ckptdrill.judging._FILES_WORTH_A_PROCESS", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert judge_run(run, matrix(), plans) == alone
    assert [read_json(run.cell(plan.cell.id) / "verdict.json") for plan in plans] == written


# --------------------------------------------------------------------------------------------------
# A chain of two resumes

CHAIN = SharedLaunches(restore_step=4, saves=SAVES, end_step=13, repeats=1)
# Step 4 lies in the first epoch of the made-up job.
CHAINED = dataclasses.replace(
    matrix(), policy=dataclasses.replace(DECLARED, out_of_scope={"epoch boundary": "step 4"})
)


def chain(job: Training | None = None) -> History:
    """Restore step 4, go on to the save at 8, and restore that: all as it should be.

    `job` is what the resumed runs train, if that is not what the source trains.
    """
    plain = healthy("fsdp2")
    plan = drill.load("chained-resume").plan(plain.evidence.plan.cell, CHAIN)
    runs = [(plan.source, 0), *((launch, 0) for launch in plan.repeats), (plan.baseline, 4)]
    records = {launch.id: histories.run(launch, Training(), at=at) for launch, at in runs}
    for launch, at in ((plan.through, 4), (plan.restore, 8)):
        records[launch.id] = histories.run(launch, job or Training(), at=at)
    return plain.given(plan=plan, records=records)


def test_a_chain_is_judged_link_by_link(tmp_path: Path) -> None:
    run, plans = on_disk(tmp_path, chain())
    assert plans[0].through is not None
    verdict = judge_run(run, CHAINED, plans)[0]
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.HELD), verdict.explanation
    cited = {ref.split("/")[1] for check in verdict.checks for ref in check.facts}
    assert cited == {plans[0].through.id, plans[0].restore.id}  # the first resume is the reference


def test_a_first_resume_that_breaks_is_named(tmp_path: Path) -> None:
    history = chain()
    lost = history.edited("state", lambda s: s["optimizer"].clear(), launch="through", step=0)
    run, plans = on_disk(tmp_path, lost)
    verdict = judge_run(run, CHAINED, plans)[0]
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.MOMENTS)
    assert verdict.explanation.startswith("the first resume already: ")


def test_what_only_the_second_resume_loses_is_found(tmp_path: Path) -> None:
    lost = chain().edited("state", lambda s: s["optimizer"].clear(), step=0)
    run, plans = on_disk(tmp_path, lost)
    verdict = judge_run(run, CHAINED, plans)[0]
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.MOMENTS)
    assert "already" not in verdict.explanation


def test_a_second_resume_of_a_run_that_never_was_is_not_run(tmp_path: Path) -> None:
    run, plans = on_disk(tmp_path, chain().ended("through", never=True))
    verdict = judge_run(run, CHAINED, plans)[0]
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.NOT_RUN)


def test_round_off_of_the_first_resume_is_not_held_against_the_second(tmp_path: Path) -> None:
    """The target adds in another order, in both links alike: the second is as the first."""
    rounded = Training(loss_factor=1 + 1e-9)
    run, plans = on_disk(tmp_path, chain(rounded))
    assert judge_run(run, CHAINED, plans)[0].word is VerdictWord.PASS
