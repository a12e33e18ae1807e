"""A stranger's own script, outside the checkout, drilled by a matrix as the README teaches it.

The healthy script must pass with nothing left open, and each of its six broken resumes must be
found, with the item blamed that the mistake is in. That the mistakes are real is shown beside, in
test_user_script_breaks_are_real.py, without ckptdrill.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

BREAKS = Path(__file__).parent / "user_script" / "breaks.py"

# 96 samples in batches of 16: six steps an epoch, so step 8 lies in the second and the window
# reaches into the third.
MATRIX = """
job:
  program: {program}
  args: [--out, "{{out}}"]
  resume_args: [--resume, "{{resume}}"]
  checkpoint: "{{out}}/ckpt-{{step}}.pt"
  saves: [4, 8, 12]
  restore_step: 8
  window: 5
  timeout_s: 180
topologies:
  two: {{dp_replicate: 2}}
matrix:
  - {{source: two, target: two}}
"""
CELL = "two_to_two.baseline"

BLAMED = {
    "moments": "optimizer state",
    "scheduler": "learning-rate schedule",
    "lr": "parameter groups and hyper-parameters",
    "sampler": "data order",
    "step": "completed step",
    "prefix": "weights",
}


@pytest.fixture(scope="module")
def healthy(user_bench: Any) -> Any:
    return user_bench.drill(user_bench.matrix("train", MATRIX.format(program="train.py")))


def test_the_healthy_script_passes(healthy: Any) -> None:
    assert healthy.code == 0, healthy.out + healthy.err
    assert healthy.judged == {CELL: ("Pass", "held", None, None)}


def test_every_item_of_the_healthy_script_was_observed_and_held(healthy: Any) -> None:
    rows = healthy.verdicts[CELL]["checks"]
    assert {row["item"]: row["status"] for row in rows} == {row["item"]: "held" for row in rows}
    numbers = healthy.check(CELL, "data order")["numbers"]
    assert numbers["steps"] == [9, 10, 11, 12, 13]
    assert numbers["global_batch"] == [16] * 5
    assert healthy.check(CELL, "loss")["numbers"]["deviation"] == [0.0] * 5


def test_the_script_of_the_stranger_is_left_alone(healthy: Any, user_bench: Any) -> None:
    own = BREAKS.with_name("train.py").read_bytes()
    assert (user_bench.folder / "train.py").read_bytes() == own
    assert {path.name for path in user_bench.folder.iterdir()} >= {"train.py", "train.yaml", "runs"}
    assert not list(user_bench.folder.glob("ckpt-*"))


@pytest.mark.parametrize("name", BLAMED)
def test_a_broken_resume_is_found_and_blamed(name: str, bench: Any) -> None:
    _write_variant(name, bench.folder)
    result = bench.drill(bench.matrix(name, MATRIX.format(program=f"train_{name}.py")))
    assert result.code == 1, result.out + result.err
    word, reason, item, subject = result.judged[CELL]
    assert (word, reason, item) == ("Unsupported", "diverged", BLAMED[name])
    assert subject
    assert BLAMED[name] in " ".join(result.out.split())


def _write_variant(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("user_script_breaks", BREAKS)
    assert spec is not None
    assert spec.loader is not None
    breaks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(breaks)
    assert set(breaks.BREAKS) == set(BLAMED)
    breaks.write_variant(name, folder)
