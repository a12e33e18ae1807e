"""A checkpoint between two micro-batches: the reference job's continues, a naive one is caught.

The naive job differs by one line: it stores its counters as they stand inside the step, so that the
samples of the first micro-batch are never trained on after a resume.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptdrill import resources

pytestmark = pytest.mark.e2e


def _drilled(folder: Path, job: str) -> dict[str, str]:
    (folder / "job.py").write_text(job, encoding="utf-8")
    matrix = (resources.matrices_dir() / "accumulation.yaml").read_text(encoding="utf-8")
    matrix = matrix.replace('"{jobs}/torch_dcp.py"', "job.py").replace("[two, one]", "[two]")
    (folder / "m.yaml").write_text(matrix, encoding="utf-8")
    command = [sys.executable, "-m", "ckptdrill", "run", str(folder / "m.yaml")]
    subprocess.run(
        [*command, "--launcher", "warm", "--runs", str(folder / "runs")],
        capture_output=True,
        check=False,
    )
    (file,) = folder.glob("runs/accumulation/latest/cells/*mid-accumulation*/verdict.json")
    verdict: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return verdict


def test_the_reference_job_saves_the_beginning_of_the_step(tmp_path: Path) -> None:
    job = (resources.jobs_dir() / "torch_dcp.py").read_text(encoding="utf-8")
    verdict = _drilled(tmp_path, job)
    assert (verdict["word"], verdict["reason"]) == ("Pass", "held"), verdict["explanation"]


def test_counters_from_inside_the_step_lose_samples(tmp_path: Path) -> None:
    job = (resources.jobs_dir() / "torch_dcp.py").read_text(encoding="utf-8")
    line = "        state.update(begun)\n"
    assert job.count(line) == 1
    verdict = _drilled(tmp_path, job.replace(line, ""))
    assert (verdict["word"], verdict["reason"]) == ("Unsupported", "diverged")
    assert verdict["blame_item"] == "data order", verdict["explanation"]
