"""The command of every night, with the drills themselves replaced by what they would write.

Two at once, a run that was killed, a clock that was moved, a disk that is full: nothing that was
found is lost, nothing that was not found is green.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser

from ckptdrill import history, journal, nightly, store, verbs
from ckptdrill import run as runs_
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.matrix import Matrix
from ckptdrill.model import Plan, Reason
from ckptdrill.nightly import Options
from ckptdrill.retention import Limits
from ckptdrill.store import RunFolder
from tests import stored_runs
from tests.stored_runs import FIRST_S, NIGHT_S

MATRIX = """
version: 1
name: quick
job:
  program: train.py
  args: [--out, "{out}"]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [4, 8]
topologies:
  two: {dp: 2}
  one: {dp: 1}
policy:
  rng: {same_world_size: continued, other_world_size: not_guaranteed}
matrix:
  - {source: two, targets: [two, one]}
"""
BASELINE, SHRINK = "two_to_two.baseline", "two_to_one.dp-shrink"
TODAY_S = FIRST_S + 100 * NIGHT_S


@dataclass
class Drills:
    """In place of launches and judge: writes the verdicts that it is told to, and ends the run."""

    found: dict[str, Reason] = field(default_factory=dict)
    given: list[runs_.Options] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    before: Callable[[RunFolder], None] = lambda _: None

    def __call__(
        self, _: Matrix, plans: Sequence[Plan], folder: RunFolder, options: runs_.Options, __: Any
    ) -> ExitCode:
        self.given.append(options)
        self.folders.append(folder.root.name)
        now_s = time.time()
        for plan in plans:
            reason = self.found.get(plan.cell.id, Reason.HELD)
            saved = {"call": "save", "step": 8, "ended_s": now_s - 60}
            stored_runs.write_cell(folder.root, plan.cell.id, reason, saved)
        self.before(folder)
        about = store.read_json(folder.run_json)
        ended = {"status": "judged", "ended_utc": stored_runs.utc(now_s), "source_unchanged": True}
        store.write_json(folder.run_json, {**about, **ended})
        return ExitCode.AS_EXPECTED if not self.found else ExitCode.UNPROVEN


@dataclass
class Bench:
    """A folder with a matrix, and nights in it."""

    folder: Path
    drills: Drills
    clock: list[float]
    capture: pytest.CaptureFixture[str]
    said: str = ""

    @property
    def runs(self) -> Path:
        return self.folder / "runs" / "quick"

    def night(self, **changes: Any) -> ExitCode:
        options = replace(Options(self.folder / "runs", python=sys.executable), **changes)
        try:
            return nightly.nightly(self.folder / "drill.yaml", options)
        finally:
            self.said = self.capture.readouterr().out

    def stored(self, number: int, **about: Any) -> Path:
        cells = {BASELINE: Reason.HELD, SHRINK: Reason.HELD}
        return stored_runs.night(self.runs, number, cells, **about)

    def killed(self, **about: Any) -> RunFolder:
        """A nightly run that began, as this program begins one, and went no further."""

        def kill(folder: RunFolder) -> None:
            store.write_json(folder.run_json, {**store.read_json(folder.run_json), **about})
            raise KeyboardInterrupt

        self.drills.before = kill
        with pytest.raises(KeyboardInterrupt):
            self.night()
        self.drills.before = lambda _: None
        return RunFolder((self.runs / "latest").resolve())


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    (tmp_path / "drill.yaml").write_text(MATRIX)
    (tmp_path / "train.py").write_text("print('never started')\n")
    drills, clock = Drills(), [TODAY_S]
    monkeypatch.setattr(verbs, "carried_out", drills)
    monkeypatch.setattr(verbs, "_check_torch", lambda *_: None)
    monkeypatch.setattr(verbs, "installed", lambda _: {"torch": "2.13.0"})
    monkeypatch.setattr(nightly, "installed", lambda _: {"torch": "2.13.0"})
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(verbs, "_now", lambda: datetime.fromtimestamp(clock[0], UTC))
    return Bench(tmp_path, drills, clock, capsys)


# --------------------------------------------------------------------------------------------------
# A quiet night


def test_a_night_drills_and_says_what_stands(bench: Bench) -> None:
    assert bench.night() is ExitCode.AS_EXPECTED
    assert "newest drill-validated resume point: step 8, saved 0.0 h ago" in bench.said
    (run,) = history.read_all(bench.runs)
    assert run.nightly
    assert (run.status, len(run.outcomes)) == ("judged", 2)


def test_the_next_night_is_another_run(bench: Bench) -> None:
    bench.night()
    bench.clock[0] += NIGHT_S
    bench.drills.found = {SHRINK: Reason.DIVERGED}
    bench.night()
    assert len(history.read_all(bench.runs)) == 2
    assert f"{SHRINK}: Pass held -> Unsupported diverged" in bench.said


def test_the_budget_is_given_on_with_the_cells_in_order(bench: Bench) -> None:
    bench.stored(1)
    bench.drills.found = {SHRINK: Reason.NOT_RUN}
    bench.night(budget_s=600.0)
    (options,) = bench.drills.given
    assert options.budget_s is not None
    assert 500 < options.budget_s <= 600
    assert options.order == (BASELINE, SHRINK)
    assert "not run: 1 of 2 cells; they are tried first next" in bench.said
    bench.clock[0] += NIGHT_S
    bench.night(budget_s=600.0)
    assert bench.drills.given[1].order == (SHRINK, BASELINE)


@pytest.mark.parametrize("changes", [{"budget_s": 0.0}, {"budget_s": -1.0}, {"max_age": "soon"}])
def test_what_makes_no_sense_is_refused_before_anything(
    bench: Bench, changes: dict[str, Any]
) -> None:
    with pytest.raises(UserError):
        bench.night(**changes)
    assert not bench.runs.exists()


def test_at_least_one_run_is_kept(bench: Bench) -> None:
    with pytest.raises(UserError, match="at least 1"):
        bench.night(limits=Limits(0))


def test_old_runs_make_room(bench: Bench) -> None:
    old = [bench.stored(number) for number in (1, 2, 3)]
    bench.night(limits=Limits(2))
    assert [root.exists() for root in old] == [False, True, True]
    assert f"removed {old[0].name}" in bench.said


# --------------------------------------------------------------------------------------------------
# Two at once


def test_a_second_night_leaves_at_once_and_changes_nothing(bench: Bench) -> None:
    with nightly.alone(bench.runs), pytest.raises(UserError) as refused:
        bench.night()
    assert refused.value.code is ExitCode.BUSY
    assert "under way" in str(refused.value)
    assert bench.drills.given == []
    assert history.read_all(bench.runs) == ()


def test_a_run_that_somebody_is_carrying_out_is_not_disturbed(bench: Bench) -> None:
    run = bench.killed()
    with journal.locked(run), pytest.raises(UserError) as refused:
        bench.night()
    assert refused.value.code is ExitCode.BUSY


def test_the_lock_of_a_killed_process_is_free(bench: Bench) -> None:
    code = "import sys, time; from pathlib import Path; from ckptdrill import nightly\n"
    code += "with nightly.alone(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(bench.runs)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError) as refused:
        bench.night()
    holder.kill()
    holder.communicate()
    assert refused.value.code is ExitCode.BUSY
    assert bench.night() is ExitCode.AS_EXPECTED


# --------------------------------------------------------------------------------------------------
# Killed half-way


def test_a_run_that_was_killed_is_continued(bench: Bench) -> None:
    killed = bench.killed()
    assert bench.night() is ExitCode.AS_EXPECTED
    assert "continues the run" in bench.said
    assert bench.drills.folders[-1] == killed.root.name
    assert len(history.read_all(bench.runs)) == 1


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"nightly": False}, "begun by hand"),
        ({"started_utc": stored_runs.utc(TODAY_S - 2 * NIGHT_S)}, "within the last day"),
        ({"started_utc": stored_runs.utc(TODAY_S + 3600)}, "within the last day"),
        ({"started_utc": None}, "within the last day"),
        ({"program_sha256": "0" * 64}, "training code changed"),
        ({"image_digest": "sha256:other"}, "image changed"),
        ({"installed": {"default": {"torch": "2.12.0"}}}, "environment 'default' changed"),
        ({"versions": {"ckptdrill": "0.0.1"}}, "ckptdrill changed"),
    ],
)
def test_a_run_of_another_make_is_not_continued(
    bench: Bench, about: dict[str, Any], why: str
) -> None:
    killed = bench.killed(**about)
    bench.night()
    assert f"the run {killed.root.name} has not ended, and is not continued: " in bench.said
    assert why in bench.said
    assert bench.drills.folders[-1] != killed.root.name
    assert killed.root.exists()


def test_a_run_of_another_matrix_is_not_continued(bench: Bench) -> None:
    bench.killed()
    (bench.folder / "drill.yaml").write_text(MATRIX + "# changed\n")
    bench.night()
    assert "the matrix has changed" in bench.said


def test_a_torn_run_is_reported(bench: Bench) -> None:
    run = bench.killed()
    run.run_json.write_text('{"status"')
    assert bench.night() is ExitCode.AS_EXPECTED
    assert "is not continued" in bench.said
    assert len(history.read_all(bench.runs)) == 2


# --------------------------------------------------------------------------------------------------
# The clock


def test_a_clock_that_was_put_back_is_said(bench: Bench) -> None:
    future = bench.stored(200)
    bench.drills.found = {BASELINE: Reason.REFUSED, SHRINK: Reason.REFUSED}
    bench.night()
    assert f"the clock is behind: the run {future.name} is dated after now" in bench.said
    assert "newest drill-validated resume point: none" in bench.said
    newest = history.read_all(bench.runs)[0]
    assert newest.name == f"{future.name}-002"  # still the newest by name


def test_a_clock_that_is_right_is_not_mentioned(bench: Bench) -> None:
    bench.stored(1)
    bench.night()
    assert "clock" not in bench.said


def test_a_clock_that_was_moved_during_the_run_is_said(bench: Bench) -> None:
    def note(folder: RunFolder) -> None:
        about = store.read_json(folder.run_json)
        store.write_json(folder.run_json, {**about, "clock_moved_s": -7200})

    bench.drills.before = note
    bench.night()
    assert "the clock was moved by -7200 s during the run" in bench.said


# --------------------------------------------------------------------------------------------------
# Metrics and age


def metrics(path: Path) -> dict[str, float]:
    families = parser.text_string_to_metric_families(path.read_text())
    return {
        "/".join([s.name, *filter(None, [s.labels.get("verdict")])]): s.value
        for family in families
        for s in family.samples
    }


def test_the_metrics_speak_of_the_newest_resume_point_of_any_run(bench: Bench) -> None:
    bench.stored(99)
    bench.drills.found = {BASELINE: Reason.REFUSED, SHRINK: Reason.NOT_RUN}
    target = bench.folder / "drills.prom"
    bench.night(metrics=target)
    found = metrics(target)
    saved_s = FIRST_S + 99 * NIGHT_S + 1800
    assert found["checkpoint_drill_validated_timestamp_seconds"] == saved_s
    assert found["checkpoint_last_committed_step"] == 8
    assert found["ckptdrill_nightly_end_timestamp_seconds"] == TODAY_S
    assert found["ckptdrill_nightly_exit_code"] == 3
    assert found["ckptdrill_nightly_cells/unsupported"] == 1
    assert found["ckptdrill_nightly_cells/not_run"] == 1
    assert target.stat().st_mode & 0o777 == 0o644


def test_without_a_resume_point_there_is_no_series(bench: Bench) -> None:
    bench.drills.found = {BASELINE: Reason.REFUSED, SHRINK: Reason.REFUSED}
    target = bench.folder / "drills.prom"
    bench.night(metrics=target)
    assert not [name for name in metrics(target) if name.startswith("checkpoint_")]


def test_a_night_that_failed_has_metrics_too(bench: Bench) -> None:
    def full(_: RunFolder) -> None:
        raise UserError("cannot go on: No space left on device", code=ExitCode.UNPROVEN)

    bench.drills.before = full
    target = bench.folder / "drills.prom"
    with pytest.raises(UserError, match="No space"):
        bench.night(metrics=target)
    assert metrics(target)["ckptdrill_nightly_exit_code"] == 3
    bench.drills.before = lambda _: None
    assert bench.night(metrics=target) is ExitCode.AS_EXPECTED
    assert "continues the run" in bench.said
    assert metrics(target)["ckptdrill_nightly_exit_code"] == 0


def test_metrics_that_cannot_be_written_change_no_verdict(bench: Bench) -> None:
    (bench.folder / "file").write_text("in the way")
    code = bench.night(metrics=bench.folder / "file" / "drills.prom")
    assert code is ExitCode.AS_EXPECTED
    assert "no metrics were written" in bench.said


@pytest.mark.parametrize(("max_age", "code"), [("1h", 0), ("30m", 0), ("7d", 0)])
def test_a_young_resume_point_is_enough(bench: Bench, max_age: str, code: int) -> None:
    assert bench.night(max_age=max_age) == code


def test_an_old_resume_point_is_an_alert(bench: Bench) -> None:
    bench.stored(90)
    bench.drills.found = {BASELINE: Reason.REFUSED, SHRINK: Reason.REFUSED}
    assert bench.night(max_age="7d") is ExitCode.UNPROVEN
    assert "ALERT: no drill-validated resume point is younger than 7d" in bench.said
    bench.clock[0] += 3600
    assert bench.night(max_age="30d") is ExitCode.UNPROVEN  # of the verdicts
    assert "ALERT" not in bench.said


# --------------------------------------------------------------------------------------------------
# A full disk, for real


@pytest.mark.e2e
@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0,
    reason="no mount namespace for this user",
)
def test_on_a_full_disk_a_night_is_unproven_and_goes_on_later(tmp_path: Path) -> None:
    """The runs lie on a tmpfs of 200 KiB, which has no room for the observer; then it grows."""
    (tmp_path / "drill.yaml").write_text(MATRIX)
    (tmp_path / "train.py").write_text("raise SystemExit('does not train')\n")
    (tmp_path / "runs").mkdir()
    command = f"{sys.executable} -m ckptdrill nightly drill.yaml --launcher warm"
    script = f"""
        mount -t tmpfs -o size=200k none runs || exit 99
        {command}; echo "code $?"
        mount -o remount,size=64m runs
        {command} --budget-s 1; echo "code $?"
    """
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert done.stdout.startswith("code 3\n"), said
    assert "free some space" in done.stderr
    assert "continues the run" in done.stdout
    assert done.stdout.count("code 3\n") == 2
    assert "Pass " not in done.stdout
