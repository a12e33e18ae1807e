"""The script of a stranger and its six broken resumes: the healthy one is exact, each mistake real.

What other tests say about finding these mistakes is worth nothing if a variant crashed, printed the
same training as the healthy script, or if the healthy script itself did not resume exactly.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.plain_run import output_of

pytestmark = pytest.mark.e2e

USER_SCRIPT = Path(__file__).parent / "user_script"
TRAIN = USER_SCRIPT / "train.py"
STEPS, SAVED = 14, 8  # an epoch has 6 steps: the save lies inside epoch 1, epoch 2 follows
FIELDS = ("step", "epoch", "lr", "loss")

# Steps after the restore at which the mistake first shows, and in which printed field.
FIRST_DIFFERENCE = {
    "moments": (1, "loss"),
    "scheduler": (1, "lr"),
    "lr": (0, "lr"),
    "sampler": (0, "loss"),
    "step": (0, "step"),
    "prefix": (0, "loss"),
}


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"user_script_{name}", USER_SCRIPT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _train(script: Path, out: Path, *arguments: str, ranks: int = 1) -> list[dict[str, str]]:
    """Run the script to its end and return what it printed, one dict per step."""
    fixed = ("--out", str(out), "--steps", str(STEPS))
    output = output_of(script, *fixed, *arguments, ranks=ranks)
    lines = [line.replace("[", "step ").replace("]", "") for line in output.splitlines()]
    words = [line.split() for line in lines]
    return [dict(zip(line[::2], line[1::2], strict=True)) for line in words]


def _first_difference(
    steps: list[dict[str, str]], reference: list[dict[str, str]]
) -> tuple[int, str] | None:
    for index, (ours, theirs) in enumerate(zip(steps, reference, strict=False)):
        for name in FIELDS:
            if ours[name] != theirs[name]:
                return index, name
    return None


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """The checkpoint of one process, and the uninterrupted steps that followed it."""
    out = tmp_path_factory.mktemp("source")
    return out / f"ckpt-{SAVED}.pt", _train(TRAIN, out)[SAVED:]


def test_one_process_resumes_exactly(
    source: tuple[Path, list[dict[str, str]]], tmp_path: Path
) -> None:
    checkpoint, reference = source
    assert _train(TRAIN, tmp_path, "--resume", str(checkpoint)) == reference


def test_two_processes_resume_exactly(tmp_path: Path) -> None:
    reference = _train(TRAIN, tmp_path, ranks=2)[SAVED:]
    checkpoint = tmp_path / f"ckpt-{SAVED}.pt"
    resumed = _train(TRAIN, tmp_path / "resumed", "--resume", str(checkpoint), ranks=2)
    assert [step["step"] for step in reference] == [str(n) for n in range(SAVED + 1, STEPS + 1)]
    assert resumed == reference


def test_the_data_of_a_step_do_not_depend_on_the_number_of_processes() -> None:
    sampler_type = _module("train").DistributedSampler
    dataset = _module("train").Signals()

    def steps(world: int) -> list[list[int]]:
        rows = 16 // world
        samplers = [sampler_type(dataset, num_replicas=world, rank=r, seed=7) for r in range(world)]
        for sampler in samplers:
            sampler.set_epoch(1)
        orders = [list(sampler) for sampler in samplers]
        starts = range(0, len(orders[0]), rows)
        return [sorted(n for order in orders for n in order[s : s + rows]) for s in starts]

    assert len(steps(1)) == 6
    assert steps(1) == steps(2) == steps(4)
    assert steps(1)[0] != steps(1)[1]


def test_every_break_has_an_expected_difference() -> None:
    assert set(_module("breaks").BREAKS) == set(FIRST_DIFFERENCE)


@pytest.mark.parametrize("name", FIRST_DIFFERENCE)
def test_broken_resume_ends_well_and_trains_something_else(
    name: str, source: tuple[Path, list[dict[str, str]]], tmp_path: Path
) -> None:
    checkpoint, reference = source
    script = _module("breaks").write_variant(name, tmp_path)
    steps = _train(script, tmp_path / "out", "--resume", str(checkpoint))
    assert _first_difference(steps, reference) == FIRST_DIFFERENCE[name]
    assert steps[-1]["step"] == str(STEPS)
