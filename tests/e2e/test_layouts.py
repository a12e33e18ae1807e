"""The reference job continues across kinds of parallelism: sharded, tensor parallel, pipelined."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

MATRIX = """\
version: 1
name: layouts
job:
  program: "{jobs}/torch_dcp.py"
  args:
    - --out={out}
    - --save-at=8,12
    - --movable
    - --accumulation=2
    - --dp-shard={dp_shard}
    - --tp={tp}
    - --pp={pp}
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [8, 12]
  restore_step: 8
  window: 4
  timeout_s: 240
topologies:
  one: {dp_shard: 1}
  fsdp2: {dp_shard: 2}
  tp2: {tp: 2}
  pp2: {pp: 2}
policy:
  rng: {same_world_size: continued, other_world_size: not_guaranteed}
matrix:
  - {source: fsdp2, targets: [tp2, pp2]}
  - {source: pp2, target: one}
"""


def test_a_checkpoint_moves_between_sharded_tensor_parallel_and_pipelined(
    tmp_path: Path, bench: Any
) -> None:
    """Every item holds: a stage's layers, moments and generators are found where they are now."""
    path = tmp_path / "layouts.yaml"
    path.write_text(MATRIX)
    result = bench.drill(path, launcher="warm")
    assert {cell: judged[:2] for cell, judged in result.judged.items()} == {
        "fsdp2_to_fsdp2.baseline": ("Pass", "held"),
        "pp2_to_pp2.baseline": ("Pass", "held"),
        "fsdp2_to_tp2.topology-change": ("Pass", "held"),
        "fsdp2_to_pp2.topology-change": ("Pass", "held"),
        "pp2_to_one.pp-change": ("Pass", "held"),
    }
    assert result.code == 0
