"""The steps that a library's loop counts are found by their names, and nothing else of it is."""

import collections
import sys
import types
from pathlib import Path
from typing import Any

import torch

from ckptdrill.observer import program

LIBRARY = """
class State:
    def __init__(self):
        self.global_step, self.epoch, self.max_steps = 5, 1, 100

class Trainer:
    def __init__(self):
        self.state, self.completed_steps, self.batch = State(), 7, 3
        self.global_step = True

    def train(self, call):
        step, global_step = 2, 9
        return call()

def loop(call):
    return call()
"""


def library(folder: Path, name: str) -> Any:
    """A module that stands where installed packages stand."""
    path = folder / "site-packages" / f"{name}.py"
    path.parent.mkdir()
    path.write_text(LIBRARY)
    module = types.ModuleType(f"{name}.trainer")
    exec(compile(LIBRARY, str(path), "exec"), module.__dict__)  # noqa: S102 - the text above
    return module


def seen() -> dict[str, int]:
    return program.library_counters(sys._getframe())


def test_the_step_of_a_trainer_is_found_in_it_and_in_its_state(tmp_path: Path) -> None:
    trainer = library(tmp_path, "plenty").Trainer()
    assert trainer.train(seen) == {
        "plenty:Trainer.completed_steps": 7,
        "plenty:Trainer.state.global_step": 5,
    }


def test_loops_without_an_object_and_torch_itself_tell_nothing(tmp_path: Path) -> None:
    assert library(tmp_path, "plenty").loop(seen) == {}
    (tmp_path / "other").mkdir()
    assert library(tmp_path / "other", "torch").Trainer().train(seen) == {}


def test_numbers_are_those_of_the_users_frames_with_fractions() -> None:
    class Job:
        def __init__(self) -> None:
            self.weights = {"class": 0.75, "size": 2}
            self.on, self.name, self.worst = True, "a", float("inf")

    def loop(job: Job, rate: float) -> dict[str, Any]:
        return program.numbers(sys._getframe())

    found = loop(Job(), 0.5)
    ours = {name: value for name, value in found.items() if name.startswith("loop.")}
    assert ours == {"loop.job.weights[class]": 0.75, "loop.job.weights[size]": 2, "loop.rate": 0.5}
    assert "loop.rate" not in program.loop_counters(sys._getframe())


def test_lists_and_tensors_that_nothing_trains_are_told_by_their_sums() -> None:
    class Job:
        def __init__(self) -> None:
            self.norms = collections.deque([1.5, 2.5], maxlen=8)
            self.queue, self.trained = torch.ones(3), torch.ones(3, requires_grad=True)
            self.names, self.large, self.empty = ["a"], [0] * 70_000, torch.ones(0)
            self.lost, self.meta = torch.tensor([float("nan")]), torch.ones(2, device="meta")

    def loop(job: Job) -> dict[str, Any]:
        return program.numbers(sys._getframe())

    found = loop(Job())
    ours = {name: value for name, value in found.items() if "loop." in name}
    assert ours == {
        "len(loop.job.norms)": 2,
        "sum(loop.job.norms)": 4.0,
        "sum(loop.job.queue)": 3.0,
    }


def test_a_tensor_without_a_sum_is_passed_over() -> None:
    def inside(batched: torch.Tensor) -> torch.Tensor:
        assert program._sum(batched) is None
        return batched

    torch.func.vmap(inside)(torch.ones(3, 2))
    assert program._sum(torch.ones(3, 2)) == 6.0
