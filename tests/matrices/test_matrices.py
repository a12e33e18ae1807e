"""The shipped matrices can be read, and the results in the README are as `run.py` writes them.

The table itself is made of stored packets: its making is tested on a small one, and that it stands
in the README whole.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptdrill import matrix, resources, verbs
from ckptdrill import plan as plans
from ckptdrill.model import Launch, Reason, VerdictWord
from ckptdrill.schedule import Capacity, Graph

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = sorted((ROOT / "matrices").glob("*.yaml"))


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrices_run", HERE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RUNNER = _runner()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_matrix_is_read_and_planned(path: Path) -> None:
    parsed = matrix.parse(path.read_bytes(), path)
    assert plans.plan_all(parsed)


def test_every_program_that_shows_a_defect_is_named_by_a_cell() -> None:
    cells = [cell for path in FILES for cell in matrix.load(path).cells if cell.expect]
    named = {Path(cell.expect.repro.program) for cell in cells if cell.expect and cell.expect.repro}
    assert named == set(resources.repros_dir().glob("*.py"))


def test_every_silent_defect_of_deepspeed_has_a_program_that_shows_it() -> None:
    files = [path for path in FILES if path.stem.startswith("deepspeed")]
    expected = {cell.id: cell.expect for path in files for cell in matrix.load(path).cells}
    silent = {name: each for name, each in expected.items() if each and each.reason == "diverged"}
    # That the exported weights are no optimizer state is no defect.
    silent = {name: each for name, each in silent.items() if not name.endswith("via-fp32")}
    assert len(silent) > 10
    assert [name for name, each in silent.items() if each.repro is None] == []


def test_the_results_of_the_readme_are_whole_rows() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    assert page.count(RUNNER.BEGIN) == page.count(RUNNER.END) == 1
    results = page.partition(RUNNER.BEGIN)[2].partition(RUNNER.END)[0]
    rows = [line for line in results.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert [cell for cell in cells if len(cell) != 5] == []
    words, reasons = ({each.value for each in kind} for kind in (VerdictWord, Reason))
    found = [cell for cell in cells if cell[0] != "source"]
    assert {cell[3] for cell in found} <= words
    assert {cell[4].removesuffix(" (unexpected)") for cell in found} <= reasons
    named = {line.split("`")[1] for line in results.splitlines() if line.startswith("`")}
    assert named <= {path.name for path in FILES}


def packet(folder: Path, **cell: Any) -> Path:
    """A run of one cell with its packet."""
    place = {"environment": "default", "topology": {"name": "two"}}
    address = {"source": place, "target": place, "drill": "baseline", "parameters": {}}
    told = {"id": "two_to_two.baseline", "address": address, "expected": True}
    run = folder / "small/latest"
    run.mkdir(parents=True)
    content = {"cells": [{**told, "verdict": "Pass", "reason": "held", **cell}]}
    (run / "packet.json").write_text(json.dumps(content))
    versions = {"default": {"python": "3.11.7", "torch": "2.13.0"}}
    about = {"environments": versions, "ended_utc": "2026-11-30T03:41:50+00:00", "took_s": 41.2}
    (run / "run.json").write_text(json.dumps(about))
    path = folder / "small.yaml"
    path.write_text("name: small\n")
    return path


def test_a_table_has_versions_and_one_row_per_cell(tmp_path: Path) -> None:
    section = RUNNER.section_of(packet(tmp_path), tmp_path)
    assert section.splitlines() == [
        "`small.yaml`: python 3.11.7, torch 2.13.0; 2026-11-30, 41 s",
        "",
        "| source | target | drill | verdict | reason |",
        "|---|---|---|---|---|",
        "| two | two | baseline | Pass | held |",
        "",
    ]


def test_what_was_not_expected_and_what_was_converted_is_told(tmp_path: Path) -> None:
    path = packet(tmp_path, id="two_to_two.baseline.via-universal", expected=False)
    row = RUNNER.section_of(path, tmp_path).splitlines()[4]
    assert row == "| two | two | baseline via universal | Pass | held (unexpected) |"


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    page = f"before\n{RUNNER.BEGIN}\nold\n{RUNNER.END}\nafter\n"
    once = RUNNER.written(page, [packet(tmp_path)], tmp_path)
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert RUNNER.written(once, [tmp_path / "small.yaml"], tmp_path) == once


def test_a_matrix_that_never_ran_has_no_table(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("name: other\n")
    assert RUNNER.section_of(path, tmp_path) == ""


@pytest.mark.parametrize(
    ("capacity", "fit", "said"),
    [
        (Capacity(4), 8, "Larger than what runs at once here (no GPU, 4 ranks)"),
        (Capacity(2, ("0", "1")), 2, "Do not fit this node (2 GPUs, 2 ranks at most)"),
        (Capacity(8, tuple("01234567")), 8, None),
    ],
)
def test_a_plan_says_what_does_not_fit_the_node(
    capacity: Capacity, fit: int, said: str | None
) -> None:
    path = ROOT / "matrices/node.yaml"
    steps = plans.steps_of(plans.plan_all(matrix.parse(path.read_bytes(), path)))
    lines = list(verbs._misfits(Graph.of(steps), capacity, fit))
    largest = max(s.topology.world_size for s in steps.values() if isinstance(s, Launch))
    assert largest == 8
    assert [said is not None and line.startswith(said) for line in lines] == [True] * len(lines)
    assert bool(lines) == (said is not None)
    assert all("fsdp8" in line for line in lines)
