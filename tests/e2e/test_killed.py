"""ckptdrill is killed at random moments and continued: the verdicts are those of a quiet run.

Two kills in each of two runs (`make thorough`: of five), at seeded moments between start and end.
After every one nothing of the run is alive, whoever was in the middle of what, and the checkpoints
that were saved are what they were.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

MATRIX = """
job:
  program: "{jobs}/torch_dcp.py"
  args: [--out, "{out}", --save-at, "4,8,12"]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [4, 8, 12]
  restore_step: 8
  window: 5
  timeout_s: 180
topologies:
  two: {dp_shard: 2}
  one: {dp_shard: 1}
policy:
  rng: {same_world_size: continued, other_world_size: not_guaranteed}
matrix:
  - {source: two, targets: [two, one]}
"""
SEEDS, KILLS = range(5), 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, new_bench: Any) -> Any:
    bench = new_bench(tmp_path_factory.mktemp("undisturbed"))
    result = bench.drill(bench.matrix("small", MATRIX), "--keep")
    assert result.code == 0, result.out + result.err
    assert {word for word, *_ in result.judged.values()} == {"Pass"}
    return result


@pytest.mark.parametrize(
    "seed", [*SEEDS[:2], *(pytest.param(seed, marks=pytest.mark.thorough) for seed in SEEDS[2:])]
)
def test_a_run_that_is_killed_and_continued_ends_with_the_same_verdicts(
    seed: int, bench: Any, undisturbed: Any, hashes: Callable[[Path], dict[str, str]]
) -> None:
    moments = random.Random(seed)
    matrix = bench.matrix("small", MATRIX)
    saved: dict[str, str] = {}
    for _ in range(KILLS):
        process = bench.start(matrix, "--keep", *_options(bench))
        time.sleep(moments.uniform(0.2, 0.9 * undisturbed.seconds))
        process.kill()
        process.wait()
        bench.nothing_stays()
        before, saved = saved, _saved(bench, hashes)
        assert before.items() <= saved.items()
    result = bench.drill(matrix, "--keep", *_options(bench))
    assert result.code == 0, result.out + result.err
    assert result.judged == undisturbed.judged
    assert result.about["source_unchanged"] is True
    assert saved.items() <= _saved(bench, hashes).items()
    assert bench.ckptdrill("verify", result.root).code == 0


def _options(bench: Any) -> list[str]:
    """Continue what there is to continue: a kill may come before anything was written."""
    return ["--resume"] if bench.newest("small") else []


def _saved(bench: Any, hashes: Callable[[Path], dict[str, str]]) -> dict[str, str]:
    """The checkpoints of the source run, once it has ended."""
    root = bench.newest("small")
    if root is None or not (root / "launches" / "source.two" / "checkpoints.json").exists():
        return {}
    return hashes(root / "work" / "source.two" / "out")
