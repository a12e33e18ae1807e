"""Saves that are interrupted everywhere: DCP over its own folder, torch.save over its own file, and
a writer that does it right. About a minute and a half on two cores.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.fact_files import read_folder
from ckptdrill.model import Fact

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "scripts" / "save_over.py"
CELL = "two_to_two.interrupted-save.{confirm}.existing"

# One path for all steps, so that every save lies over the one before it.
MATRIX = """
job:
  program: {program}
  args: [--out, "{{out}}", --how, {how}, --save-at, "4,8"]
  resume_args: [--resume, "{{resume}}"]
  checkpoint: "{{out}}/checkpoint"
  saves: [4, 8]
  restore_step: 8
  window: 3
  timeout_s: 60
topologies:
  two: {{dp_replicate: 2}}
policy:
  out_of_scope: {{inventory: a later save would overwrite the one that is restored}}
matrix:
  - source: two
    target: two
    drills: [interrupted-save: {{over: existing, confirm: {confirm}}}]
"""


@pytest.fixture(scope="module")
def drilled(new_bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run for each way of saving, by its name."""
    bench = new_bench(tmp_path_factory.mktemp("interrupted"))
    runs = {}
    for how, confirm in (("dcp", 2), ("naive", 1), ("careful", 1)):
        text = MATRIX.format(program=SCRIPT, how=how, confirm=confirm)
        runs[how] = (bench.drill(bench.matrix(how, text)), CELL.format(confirm=confirm))
    return runs


def points(drilled: Any, how: str) -> dict[str, dict[str, Any]]:
    """The table of points of a run, by id."""
    result, cell = drilled[how]
    found: list[dict[str, Any]]
    found = result.check(cell, "kept generations")["numbers"]["points"]
    return {point["id"]: point for point in found}


def test_dcp_over_its_own_folder_loads_a_mixture(drilled: Any) -> None:
    result, cell = drilled["dcp"]
    assert result.judged[cell][:3] == ("Unsupported", "diverged", "kept generations"), result.out
    mixed = {name: p for name, p in points(drilled, "dcp").items() if p["class"] == "mixed"}
    second = next(p for p in mixed.values() if p["rank"] == 1 and p["op"] == "open")
    assert (second["path"], second["moment"]) == ("checkpoint/__1_0.distcp", "before")
    assert second["files"]["old"] > 0 < second["files"]["new"]
    assert any(p["confirmed"] for p in mixed.values())


def test_dcp_loses_the_old_checkpoint_before_it_has_the_new_one(drilled: Any) -> None:
    window = [p for p in points(drilled, "dcp").values() if p["op"] == "rename"]
    assert {p["class"] for p in window} == {"lost"}
    assert {p["path"] for p in window} == {"checkpoint/.metadata.tmp"}


def test_every_event_of_every_rank_is_classified(drilled: Any) -> None:
    for how in drilled:
        found = points(drilled, how)
        assert not [p for p in found.values() if p["class"] == "unknown"]
        for rank in (0, 1):
            events = {p["event"] for p in found.values() if p["rank"] == rank}
            assert events == set(range(max(events) + 1))
    assert {p["class"] for p in points(drilled, "dcp").values()} >= {"older", "newest", "lost"}


def test_torch_save_over_its_own_file_loses_everything_while_it_writes(drilled: Any) -> None:
    result, cell = drilled["naive"]
    assert result.judged[cell][:2] == ("Unsupported", "refused"), result.out
    lost = {p["moment"] for p in points(drilled, "naive").values() if p["class"] == "lost"}
    assert lost == {"unwritten", "torn"}


def test_a_new_file_renamed_over_the_old_one_keeps_a_generation(drilled: Any) -> None:
    result, cell = drilled["careful"]
    assert result.judged[cell][:2] == ("Pass", "held"), result.out
    assert {p["class"] for p in points(drilled, "careful").values()} == {"older", "newest"}


def test_judging_again_needs_no_launch(drilled: Any, bench: Any) -> None:
    for how in ("dcp", "careful"):
        result, _ = drilled[how]
        before = result.verdicts
        again = bench.ckptdrill("judge", result.root)
        assert again.code == result.code
        assert result.verdicts == before


def test_the_scripts_reproduce_the_mixture_and_the_loss(drilled: Any, tmp_path: Path) -> None:
    result, cell = drilled["dcp"]
    scripts = result.root / "cells" / cell
    named = points(drilled, "dcp")

    def replayed(kept: str) -> tuple[int, tuple[Fact, ...]]:
        script = next(
            s for s in sorted(scripts.glob("repro-*.sh")) if named[_id(s)]["class"] == kept
        )
        folder = tmp_path / kept
        done = subprocess.run(["sh", script, folder], capture_output=True, check=False, timeout=120)
        return done.returncode, read_folder(folder / "facts", "replayed", 1).facts

    code, facts = replayed("mixed")
    assert code == 0
    restored = next(f for f in facts if f.kind == "state" and f.data["at"] == "forward")
    source = read_folder(result.root / "launches" / "source.two", "source.two", 1).facts
    saved = {
        fact.step: fact.data["weights"]
        for fact in source
        if fact.kind == "state" and fact.data["at"] == "save"
    }
    weights = restored.data["weights"]
    assert {step for step in (4, 8) for n in weights if weights[n] == saved[step][n]} == {4, 8}

    code, facts = replayed("lost")
    assert code != 0
    assert not [fact for fact in facts if fact.kind == "stepped"]


def _id(script: Path) -> str:
    return script.name.removeprefix("repro-").removesuffix(".sh")
