"""The FSDP2 reference job resumes exactly, and trains the same on any number of ranks.

Every drill of the quickstart rests on this job being healthy: with the layout unchanged the next
steps and the next checkpoint are equal bit for bit; with another number of ranks only the order of
float additions may differ. The runs of the source are shared, since starting processes costs most.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.plain_run import output_of

pytestmark = pytest.mark.e2e

JOB = Path(__file__).resolve().parents[2] / "drills/jobs/torch_dcp.py"
MIXED = ("--dtype", "bf16", "--accumulation", "2", "--scaler", "--scaler-init", "3e38")


def _train(ranks: int, out: Path, *arguments: str) -> list[str]:
    """Run the job to its end and return its output lines."""
    return output_of(JOB, "--out", str(out), *arguments, ranks=ranks).splitlines()


def _steps(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("step ")]


def _losses(steps: list[str]) -> list[float]:
    return [float(re.search(r"loss (\S+)", step)[1]) for step in steps]  # type: ignore[index]


def _rates(steps: list[str]) -> list[str]:
    return [re.search(r"lr (\S+)", step)[1] for step in steps]  # type: ignore[index]


def _without_random_row(steps: list[str]) -> list[str]:
    return [re.sub(r" (loss|row|jitter) \S+", "", step) for step in steps]


def _contents(folder: Path, scratch: Path) -> dict[str, Any]:
    """Every leaf of a checkpoint, under its path."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, scratch)
    leaves: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}/{key}", inner)
        elif isinstance(value, torch.Tensor):
            leaves[prefix] = (value.dtype, tuple(value.shape), value.numpy().tobytes())
        else:
            leaves[prefix] = repr(value)

    walk("", torch.load(scratch, weights_only=False))
    return leaves


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Folder and steps of 12 uninterrupted steps on 2 ranks; epoch 1 begins with step 7."""
    out = tmp_path_factory.mktemp("source")
    return out, _steps(_train(2, out, "--save-at", "4,8", "--max-steps", "12"))


def test_source_learns_over_an_epoch_boundary(source: tuple[Path, list[str]]) -> None:
    out, steps = source
    assert len(steps) == 12
    assert [" epoch 1 " in step for step in steps].index(True) == 6
    assert _losses(steps)[-1] < _losses(steps)[0] - 0.2
    assert sorted(path.name for path in out.iterdir()) == ["step-4", "step-8"]


def test_same_ranks_are_equal_bit_for_bit(source: tuple[Path, list[str]], tmp_path: Path) -> None:
    out, reference = source
    resume = ("--resume", str(out / "step-4"), "--save-at", "8", "--max-steps", "12")
    assert _steps(_train(2, tmp_path / "run", *resume)) == reference[4:]

    expected = _contents(out / "step-8", tmp_path / "expected.pt")
    assert _contents(tmp_path / "run/step-8", tmp_path / "found.pt") == expected
    earlier = _contents(out / "step-4", tmp_path / "earlier.pt")
    assert earlier.keys() == expected.keys()
    constant = {key for key in expected if earlier[key] == expected[key]}
    assert {"/model/frozen.weight", "/model/frozen.bias"} < constant
    for moving in ("/model/seen", "/ema/norm.weight", "/dropout/0", "/counters/cursor"):
        assert moving in expected.keys() - constant
    assert {f"/rng.rank{r}/{k}" for r in (0, 1) for k in ("python", "torch", "numpy")} <= (
        expected.keys() - constant
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_ranks_train_the_same(
    ranks: int, source: tuple[Path, list[str]], tmp_path: Path
) -> None:
    out, reference = source
    lines = _train(ranks, tmp_path, "--resume", str(out / "step-4"), "--max-steps", "12")
    assert _losses(_steps(lines)) == pytest.approx(_losses(reference[4:]), rel=1e-6)
    assert _without_random_row(_steps(lines)) == _without_random_row(reference[4:])
    reseeded = sorted(line[:6] for line in lines if "reseeded" in line)
    assert reseeded == [f"rank {rank}" for rank in range(2, ranks)]


def test_mixed_precision_accumulation_and_scaler(tmp_path: Path) -> None:
    steps = _steps(_train(2, tmp_path / "a", "--save-at", "4", "--max-steps", "9", *MIXED))
    rates = _rates(steps)
    assert rates[0] == rates[1], "the scaler skipped no step"
    assert len(set(rates[4:])) > 1, "the scaler skipped every step after the save"
    resume = ("--resume", str(tmp_path / "a/step-4"), "--max-steps", "9", *MIXED)
    assert _steps(_train(2, tmp_path / "b", *resume)) == steps[4:]
