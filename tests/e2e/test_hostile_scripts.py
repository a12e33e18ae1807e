"""Whatever the job does, the run ends, says what happened, and leaves nothing alive.

Each script is the healthy one of a stranger with one hostile line. The exit code is that of the
verdicts, standard error never shows a traceback of ckptdrill, and cells that are not poisoned come
out as if nothing had happened beside them.
"""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

TRAIN = Path(__file__).parent / "user_script" / "train.py"
TIMEOUT_S = 15  # of the launches that hang
PRINTED_BYTES = 200_000_000

RESTORE = '        model.load_state_dict(ckpt["model"])\n'
LOAD = 'torch.load(args.resume, map_location="cpu", weights_only=False)'
STEP = "            step += 1\n"
SAVE = "            if step % args.save_every == 0:\n"

MATRIX = """
job:
  program: {name}.py
  args: [--out, "{{out}}"]
  resume_args: [--resume, "{{resume}}"]
  checkpoint: "{{out}}/ckpt-{{step}}.pt"
  saves: [4, 8]
  restore_step: 8
  window: 5
  timeout_s: {timeout_s}
topologies:
  one: {{dp_replicate: 1}}
  two: {{dp_replicate: 2}}
  three: {{dp_replicate: 3}}
  four: {{dp_replicate: 4}}
policy:
  rng: {{same_world_size: continued, other_world_size: not_guaranteed}}
matrix:
"""
ONE = "  - {source: one, target: one}\n"
CELL = "one_to_one.baseline"


def _write(
    bench: Any, name: str, old: str, new: str, cells: str = ONE, timeout_s: int = 180
) -> Path:
    """The script with one place changed, and its matrix."""
    text = TRAIN.read_text()
    assert text.count(old) == 1
    (bench.folder / f"{name}.py").write_text(text.replace(old, new))
    path: Path = bench.matrix(name, MATRIX.format(name=name, timeout_s=timeout_s) + cells)
    return path


def _verdict(result: Any, cell: str = CELL) -> tuple[str, str]:
    word, reason, _, _ = result.judged[cell]
    return word, reason


# ------------------------------------------------------------------------------------ hanging jobs

STUCK = {
    "in_training": (
        STEP,
        "            import time; time.sleep(10_000 if step == 2 else 0)\n" + STEP,
    ),
    "in_load": (LOAD, "torch.load(Stalled(args.resume), weights_only=False)"),
    "after_restore": (
        STEP,
        "            import time; time.sleep(10_000 if args.resume and step == 9 else 0)\n" + STEP,
    ),
    "never_saves": (SAVE, "            if False:\n"),
    "after_load": (RESTORE, "        import time; time.sleep(10_000)\n" + RESTORE),
}
STALLED = '''

class Stalled:
    """A file on storage that has stopped answering."""

    def __init__(self, path):
        self.name = path

    def read(self, *_):
        import time

        time.sleep(10_000)

    readline = seek = tell = readinto = read


def get_args('''


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory, new_bench: Any) -> dict[str, Any]:
    """These runs side by side: most of them only wait."""
    bench = new_bench(tmp_path_factory.mktemp("hanging"))
    started = {}
    for name, (old, new) in STUCK.items():
        matrix = _write(bench, name, old, new, timeout_s=TIMEOUT_S)
        script = bench.folder / f"{name}.py"
        script.write_text(script.read_text().replace("\n\ndef get_args(", STALLED))
        started[name] = bench.start(matrix)
    results = {name: bench.finish(process, name) for name, process in started.items()}
    bench.nothing_stays()
    return results


def test_a_job_that_hangs_in_training_gives_no_source(stuck: dict[str, Any]) -> None:
    result = stuck["in_training"]
    assert result.code == 3
    assert _verdict(result) == ("Unproven", "source-failed")
    explanation = result.verdicts[CELL]["explanation"]
    assert "time limit" in explanation
    assert "{0: 3}" in explanation  # how far each rank came


def test_a_restore_that_never_comes_back_from_its_load_is_hung(stuck: dict[str, Any]) -> None:
    result = stuck["in_load"]
    assert result.code == 1
    assert _verdict(result) == ("Unsupported", "hung")
    verdict = result.verdicts[CELL]
    assert "never came back from torch.load" in verdict["explanation"]
    assert "rank*.stacks" in verdict["next_move"]
    stacks = (result.launch("restore.one.baseline") / "rank0.stacks").read_text()
    assert " in read" in stacks  # the line that hangs is in the evidence


def test_a_restore_that_comes_to_no_step_after_its_load_is_hung(stuck: dict[str, Any]) -> None:
    result = stuck["after_load"]
    assert result.code == 1
    assert _verdict(result) == ("Unsupported", "hung")
    assert "no rank came to its first step" in result.verdicts[CELL]["explanation"]


def test_a_restored_job_that_hangs_later_is_not_called_unsupported(stuck: dict[str, Any]) -> None:
    result = stuck["after_restore"]
    assert result.code == 3
    assert _verdict(result) == ("Unproven", "timed-out")
    explanation = result.verdicts[CELL]["explanation"]
    assert "time limit" in explanation
    assert "{0: 2}" in explanation  # how far each rank came


# ------------------------------------------------------------------------------ one poisoned cell

POISON = """\
        import signal
        if world == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if world == 3:
            raise RuntimeError("three ranks are not for me")
        if world == 4 and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if world == 4:
            dist.barrier()
"""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory, new_bench: Any) -> Any:
    bench = new_bench(tmp_path_factory.mktemp("poisoned"))
    cells = "  - {source: two, targets: [two, one, three, four]}\n"
    result = bench.drill(_write(bench, "poisoned", RESTORE, POISON + RESTORE, cells))
    bench.nothing_stays()
    return result


def test_the_cells_beside_a_poisoned_one_are_unharmed(poisoned: Any) -> None:
    assert _verdict(poisoned, "two_to_two.baseline") == ("Pass", "held")
    assert poisoned.code == 3
    assert len(poisoned.verdicts) == 4
    assert poisoned.about["source_unchanged"] is True


def test_a_rank_that_dies_of_a_signal(poisoned: Any) -> None:
    verdict = poisoned.verdicts["two_to_one.dp-shrink"]
    assert (verdict["word"], verdict["reason"]) == ("Unproven", "crashed")
    assert "rank 0 was ended by SIGSEGV" in verdict["explanation"]
    assert "restore.two_to_one.dp-shrink/rank0.err" in verdict["next_move"]


def test_a_restore_that_raises_is_told_with_its_words(poisoned: Any) -> None:
    verdict = poisoned.verdicts["two_to_three.dp-grow"]
    assert (verdict["word"], verdict["reason"]) == ("Unproven", "crashed")
    assert "RuntimeError: three ranks are not for me" in verdict["explanation"]


def test_the_rank_that_was_killed_first_is_to_blame(poisoned: Any) -> None:
    verdict = poisoned.verdicts["two_to_four.dp-grow"]
    assert (verdict["word"], verdict["reason"]) == ("Unproven", "crashed")
    assert "rank3.err" in verdict["next_move"], verdict["explanation"]


# ----------------------------------------------------------------------------------- other habits


def test_a_job_that_never_saves(stuck: dict[str, Any]) -> None:
    result = stuck["never_saves"]
    assert result.code == 3
    assert _verdict(result) == ("Unproven", "source-failed")
    verdict = result.verdicts[CELL]
    assert "saved nothing where the matrix says" in verdict["explanation"]
    assert "job.checkpoint" in verdict["next_move"]


def test_a_job_that_prints_without_end_and_leaves_a_daemon(bench: Any) -> None:
    noise = f"""\
            if step == 2 and not args.resume:
                for _ in range({PRINTED_BYTES // 1_000_000}):
                    print("x" * 999_999)
            if step == 3 and os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    import time
                    os.closerange(0, 1000)
                    time.sleep(10_000)
                os._exit(0)
"""
    process = bench.start(_write(bench, "noisy", STEP, STEP + noise))
    peak_kib = _peak_kib(process)
    result = bench.finish(process, "noisy")
    assert result.code == 0, result.err
    assert _verdict(result) == ("Pass", "held")
    printed = result.launch("source.one") / "rank0.out"
    assert printed.stat().st_size > PRINTED_BYTES
    ended = json.loads((result.launch("source.one") / "exit.json").read_bytes())
    assert ended["orphans_killed"] >= 1
    assert 0 < peak_kib * 1024 < PRINTED_BYTES
    shutil.rmtree(result.root)


def _peak_kib(process: subprocess.Popen[str]) -> int:
    """The largest resident size of a process while it runs, in KiB."""
    peak = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        values = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        peak = max([peak, *map(int, values)])
        time.sleep(0.1)
    return peak


def test_a_script_with_a_syntax_error_is_refused_before_anything_starts(bench: Any) -> None:
    result = bench.drill(_write(bench, "wrong", STEP, "            step +=\n"))
    assert result.code == 2
    line = TRAIN.read_text().splitlines().index(STEP.rstrip("\n")) + 1
    assert f"wrong.py:{line}: not Python" in result.err
    assert result.root is None
