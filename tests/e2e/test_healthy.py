"""The healthy reference job over many pairs of world sizes: every cell must be Pass.

A tool that cries wolf is switched off. So the job that is known to restore everything is drilled
over
world sizes up, down and across non-divisors, in two precisions, with and without accumulation; a
global batch of 12 divides by all of them. The state must be bitwise equal in every cell.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PAIRS = {"one": ["one", "two"], "two": ["one", "two", "four"], "three": ["two"], "four": ["two"]}
MATRIX = """\
version: 1
name: healthy
job:
  program: "{{jobs}}/torch_dcp.py"
  args: [--out, "{{out}}", --save-at, "{saves}", --dtype, {dtype}, --accumulation, "{accumulation}"]
  resume_args: [--resume, "{{resume}}"]
  checkpoint: "{{out}}/step-{{step}}"
  saves: [{saves}]
  restore_step: {restore_step}
  window: {window}
  env: {{GLOBAL_BATCH: "12"}}
  timeout_s: 240
topologies:
  one: {{dp_shard: 1}}
  two: {{dp_shard: 2}}
  three: {{dp_shard: 3}}
  four: {{dp_shard: 4}}
policy:
  rng: {{same_world_size: continued, other_world_size: not_guaranteed}}
matrix:
{entries}
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("dtype", "accumulation"),
    [
        ("fp32", 1),
        ("bf16", 2),
        pytest.param("fp32", 2, marks=pytest.mark.thorough),
        pytest.param("bf16", 1, marks=pytest.mark.thorough),
    ],
)
def test_every_cell_of_the_healthy_job_passes(
    tmp_path: Path, dtype: str, accumulation: int
) -> None:
    # 48 samples are 4 steps of 12, or 2 steps of 2 x 12: the save lies in the second epoch and the
    # window reaches the third.
    steps = {"saves": "6, 8", "restore_step": 6, "window": 4}
    if accumulation == 2:
        steps = {"saves": "3, 5", "restore_step": 3, "window": 3}
    entries = "\n".join(f"  - {{source: {s}, targets: {t}}}" for s, t in PAIRS.items())
    path = tmp_path / "healthy.yaml"
    path.write_text(MATRIX.format(dtype=dtype, accumulation=accumulation, entries=entries, **steps))
    command = [sys.executable, "-m", "ckptdrill", "run", str(path), "--launcher", "warm"]
    done = subprocess.run(
        [*command, "--runs", str(tmp_path / "runs")], capture_output=True, text=True, check=False
    )
    verdicts = {
        file.parent.name: json.loads(file.read_text())
        for file in (tmp_path / "runs").glob("healthy/latest/cells/*/verdict.json")
    }
    assert len(verdicts) == 9, done.stderr  # 7 pairs, and the baselines of three and four
    assert {
        cell: f"{v['word']}: {v['explanation']}"
        for cell, v in verdicts.items()
        if v["word"] != "Pass"
    } == {}
    weights = [
        check for v in verdicts.values() for check in v["checks"] if check["item"] == "weights"
    ]
    assert [check["status"] for check in weights] == ["held"] * 9
    assert done.returncode == 0, done.stdout + done.stderr
