"""An engine that drives the optimizer, the schedule and the checkpoints is seen as one loop.

The script has a module in DeepSpeed's place: an engine with its entry points, which lets the job's
optimizer step on one flat tensor of each group, with one group at a time.
"""

import pytest

from tests.observer.conftest import Observe

pytestmark = pytest.mark.e2e

SCRIPT = """
    import os, sys, types
    import torch

    class DeepSpeedEngine(torch.nn.Module):
        def __init__(self, model, optimizer, schedule):
            super().__init__()
            self.module, self.inner, self.lr_scheduler = model, optimizer, schedule
            self.optimizer = types.SimpleNamespace(optimizer=optimizer)
            self.global_steps = self.global_samples = self.skipped_steps = 0
            self.groups = [list(group["params"]) for group in optimizer.param_groups]
            self.flats = []
            for group in optimizer.param_groups:
                flat = torch.cat([p.detach().reshape(-1) for p in group["params"]])
                self.flats.append(flat.requires_grad_())
                group["params"] = [self.flats[-1]]
            self.optimizer.fp16_groups = self.groups
            self.optimizer.fp32_groups_flat = self.flats

        def forward(self, x):
            return self.module(x)

        def _take_model_step(self, lr_kwargs):
            self.global_steps += 1
            if self.global_steps == 3:
                self.skipped_steps += 1
                return
            every = self.inner.param_groups
            for group, flat, parameters in zip(every, self.flats, self.groups):
                flat.grad = torch.cat([p.grad.reshape(-1) for p in parameters])
                self.inner.param_groups = [group]
                self.inner.step()
            self.inner.param_groups = every
            self.lr_scheduler.step()

        def save_checkpoint(self, save_dir, tag=None, client_state={}):
            os.makedirs(save_dir, exist_ok=True)
            torch.save(client_state, os.path.join(save_dir, "file"))

        def load_checkpoint(self, load_dir, tag=None, load_module_only=False):
            path = os.path.join(load_dir, "file")
            if not os.path.exists(path):
                return None, None
            return path, torch.load(path)

    package = types.ModuleType("deepspeed.runtime.engine")
    package.DeepSpeedEngine = DeepSpeedEngine
    sys.modules["deepspeed.runtime.engine"] = package

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([
        {"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2},
    ])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = DeepSpeedEngine(model, optimizer, schedule)
    assert engine.load_checkpoint("nowhere") == (None, None)
    for step in range(3):
        for micro in range(2):
            engine(torch.ones(4, 3)).mean().backward()
        engine._take_model_step(None)
    engine.save_checkpoint("some", tag="step-3", client_state={"cursor": 5})
    engine.load_checkpoint("some", load_module_only=True)
    engine(torch.ones(4, 3)).mean().backward()
"""


def test_an_engine_is_one_loop(observe: Observe) -> None:
    observed = observe(SCRIPT, sample_steps=[1])
    observed.is_whole()
    stepped = observed.facts("stepped")
    assert [fact["step"] for fact in stepped] == [1, 2, 3]
    assert [fact["lr"] for fact in stepped] == [[0.1, 0.2], [0.05, 0.1], [0.1 / 3, 0.2 / 3]]
    assert [fact["micro_batches"] for fact in stepped] == [2, 2, 2]
    assert [fact.get("skipped", False) for fact in stepped] == [False, False, True]
    assert len(observed.facts("batch")) == 7


def test_its_state_is_told_by_parameter(observe: Observe) -> None:
    state = observe(SCRIPT, sample_steps=[1]).state(1)
    assert {"weight.fp32", "weight.exp_avg", "bias.exp_avg_sq", "bias.step"} <= set(
        state["optimizer"]
    )
    assert state["optimizer"]["weight.fp32"][1:4] == [[2, 3], [0], [6]]
    assert [group["members"] for group in state["groups"][0]] == [["weight"], ["bias"]]


def test_its_saves_and_loads_are_calls_of_their_own(observe: Observe) -> None:
    observed = observe(SCRIPT)
    assert observed.column("save_begin", "call") == ["deepspeed.save_checkpoint"]
    assert observed.column("save_begin", "path")[0].endswith("/some/step-3")
    assert observed.column("load_end", "call") == ["deepspeed.load_checkpoint"] * 2
    assert observed.column("engine_load", "found") == [False, True]
    assert observed.column("engine_load", "mechanism") == ["same layout", "weights only"]
    by_place = {fact["at"]: fact["leaves"] for fact in observed.facts("inventory")}
    assert by_place["save"]["client_state.cursor"] == 5
    assert by_place["save"]["engine.global_steps"] == 3
    assert by_place["load"]["client_state.cursor"] == 5
