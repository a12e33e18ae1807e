"""A user's mistake costs a second and three lines: what is wrong, where, and what to do next.

Exit code 2, nothing started, nothing written, no traceback (which the bench checks everywhere).
"""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

MATRIX = """
job:
  program: train.py
  args: [--out, "{out}"]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/ckpt-{step}.pt"
  saves: [4, 8]
topologies:
  one: {dp_shard: 1}
matrix:
  - {source: one, target: one}
"""


@pytest.fixture
def matrix(bench: Any) -> Path:
    (bench.folder / "train.py").write_text("print('never started')\n")
    path: Path = bench.matrix("fine", MATRIX)
    return path


def _refused(result: Any, *words: str) -> None:
    assert result.code == 2, result.out + result.err
    assert result.root is None
    assert len(result.err.splitlines()) <= 8
    for word in words:
        assert word in result.err


def test_a_matrix_that_does_not_exist(bench: Any) -> None:
    _refused(bench.ckptdrill("run", "nowhere.yaml"), "nowhere.yaml")


def test_a_folder_in_place_of_a_matrix(bench: Any) -> None:
    _refused(bench.ckptdrill("run", bench.folder), str(bench.folder))


def test_a_matrix_that_is_not_yaml(bench: Any) -> None:
    path = bench.matrix("broken", "job: [unclosed\ntopologies: {")
    _refused(bench.drill(path), "broken.yaml", ":4:")


def test_a_matrix_of_bytes(bench: Any) -> None:
    path = bench.folder / "noise.yaml"
    path.write_bytes(bytes(range(256)))
    _refused(bench.drill(path), "noise.yaml")


def test_a_misspelt_key_is_named_with_its_line_and_the_nearest_one(bench: Any) -> None:
    path = bench.matrix("typo", MATRIX.replace("resume_args", "resume_arg"))
    line = path.read_text().splitlines().index('  resume_arg: [--resume, "{resume}"]') + 1
    _refused(bench.drill(path), f"typo.yaml:{line}:", "resume_arg", "resume_args")


def test_a_verb_that_does_not_exist(bench: Any) -> None:
    _refused(bench.ckptdrill("rum", "fine.yaml"), "rum")


def test_an_option_that_does_not_exist(bench: Any, matrix: Path) -> None:
    _refused(bench.ckptdrill("run", matrix, "--wram"), "--wram")


def test_a_launcher_that_does_not_exist(bench: Any, matrix: Path) -> None:
    _refused(bench.drill(matrix, launcher="wram"), "wram", "warm", "torchrun")


def test_a_runs_folder_that_cannot_be_made(bench: Any, matrix: Path) -> None:
    (bench.folder / "file").write_text("in the way")
    result = bench.ckptdrill("run", matrix, "--runs", bench.folder / "file" / "runs")
    _refused(result, "run folder", "--runs")


def test_a_topology_that_does_not_fit(bench: Any, matrix: Path) -> None:
    path = bench.matrix("large", MATRIX.replace("dp_shard: 1", "dp_shard: 4096"))
    _refused(bench.drill(path), "4096", "large.yaml")


def test_an_interpreter_that_does_not_exist(bench: Any, matrix: Path) -> None:
    _refused(bench.drill(matrix, "--python", "/nowhere/python"), "/nowhere/python")


def test_nothing_to_resume(bench: Any, matrix: Path) -> None:
    _refused(bench.drill(matrix, "--resume"), "no run of 'fine'", "without --resume")


def test_a_packet_that_is_none(bench: Any) -> None:
    _refused(bench.ckptdrill("verify", bench.folder), "not the folder of a run")
    _refused(bench.ckptdrill("judge", bench.folder / "absent"), "not the folder of a run")


def test_help_teaches_the_exit_codes(bench: Any) -> None:
    result = bench.ckptdrill("--help")
    assert result.code == 0
    for word in ("run", "plan", "judge", "verify", "Exit codes", "Unproven against expectation"):
        assert word in " ".join(result.out.split())
