"""DeepSpeed's own checkpoints, seen from inside the engine: what continues, what is refused, and a
load that leaves the optimizer behind without a word.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="`make deepspeed` installs it"
    ),
]

MATRIX = """\
version: 1
name: deepspeed
repeats: 0
job:
  program: "{jobs}/deepspeed_zero.py"
  args: [--out, "{out}", --save-at, "8,12", --stage, "{zero_stage}"]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [8, 12]
  restore_step: 8
  window: 5
  timeout_s: 240
topologies:
  two: {dp: 2, zero_stage: 2}
  one: {dp: 1, zero_stage: 2}
policy:
  rng: {same_world_size: continued, other_world_size: not_guaranteed}
matrix:
  - {source: two, target: one}
  - {source: two, target: two, drills: [resume-options: {args: --weights-only}]}
"""
WEIGHTS_ONLY = "two_to_two.resume-options.weights-only"


def test_zero_stage_2_continues_refuses_another_size_and_loses_what_is_not_loaded(
    tmp_path: Path, bench: Any
) -> None:
    path = tmp_path / "deepspeed.yaml"
    path.write_text(MATRIX)
    result = bench.drill(path)
    assert {cell: judged[:3] for cell, judged in result.judged.items()} == {
        "two_to_two.baseline": ("Pass", "held", None),
        "two_to_one.dp-shrink": ("Unsupported", "refused", None),
        WEIGHTS_ONLY: ("Unsupported", "diverged", "optimizer state"),
    }
    moments = result.check("two_to_two.baseline", "optimizer state")
    assert moments["summary"].startswith("88 entries equal")  # master, two moments, step of 22
    assert "ZeRORuntimeException" in result.verdicts["two_to_one.dp-shrink"]["explanation"]
    mechanism = result.check(WEIGHTS_ONLY, "topology and mechanism")
    assert mechanism["numbers"]["mechanism"] == "weights-only"
