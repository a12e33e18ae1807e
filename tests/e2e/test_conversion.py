"""A conversion between save and restore, through the command line, on real processes."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

# Two checkpoints of another format are one that was packed, and one that was packed by half.
CONVERTERS = {
    "pack": "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])",
    "refuse": "import sys; raise RuntimeError('step 8 was saved by another release')",
}
MATRIX = """\
version: 1
name: conversion
job:
  program: "{jobs}/torch_dcp.py"
  args: ["--out={out}", --save-at=8]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [8]
  window: 3
topologies:
  one: {dp_shard: 1}
conversions:
  pack: {command: ["{python}", pack.py, "{source_checkpoint}", "{converted}"]}
  refuse: {command: ["{python}", refuse.py, "{source_checkpoint}", "{converted}"]}
repeats: 0
policy:
  out_of_scope:
    data: the window ends before the next epoch
    inventory: there is no later save
    loss: the source is not repeated here
    updates: the source is not repeated here
matrix:
  - {source: one, conversion: pack}
  - source: one
    conversion: refuse
    expect: {verdict: Unsupported, reason: refused}
"""


def test_what_was_converted_is_restored_and_what_was_refused_is_told(
    tmp_path: Path, bench: Any
) -> None:
    for name, text in CONVERTERS.items():
        (tmp_path / f"{name}.py").write_text(text)
    path = tmp_path / "conversion.yaml"
    path.write_text(MATRIX)
    result = bench.drill(path, launcher="warm")
    assert {cell: judged[:2] for cell, judged in result.judged.items()} == {
        "one_to_one.baseline": ("Pass", "held"),
        "one_to_one.baseline.via-pack": ("Pass", "held"),
        "one_to_one.baseline.via-refuse": ("Unsupported", "refused"),
    }, result.out
    assert result.code == 0
    packet = json.loads((result.root / "packet.json").read_bytes())
    restores = {cell["id"]: cell["restore"] for cell in packet["cells"]}
    assert restores["one_to_one.baseline.via-pack"]["phases_s"]["conversion"] > 0
    assert "conversion" not in restores["one_to_one.baseline"]["phases_s"]
    row = result.check("one_to_one.baseline.via-pack", "topology and mechanism")
    assert row["numbers"]["mechanism"] == "conversion"
    said = result.verdicts["one_to_one.baseline.via-refuse"]["explanation"]
    assert said.endswith("RuntimeError: step 8 was saved by another release")
    ledger = bench.ckptdrill("ledger", result.root)
    assert "conversion" in ledger.out
