"""What the observer sees in training loops as people write them, one small real script per kind.

Each script prints what it knows itself (losses, steps, rates); the facts must say the same.
"""

import json
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

# A model, data that are told apart by their row, and the plainest loop.
COMMON = """
    import json, os, sys
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    DATA = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    TARGET = torch.randn(64, 3, generator=torch.Generator().manual_seed(2))
    LOSSES = []

    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def say(**values):
        print(json.dumps(values), flush=True)
"""


def _said(observed: Any) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(observed.out().splitlines()[-1])
    return said


def _losses(observed: Any, rank: int = 0) -> list[float]:
    """The sum over the micro-batches of each step."""
    return [sum(losses) for losses in observed.column("stepped", "losses", rank)]


PLAIN = (
    COMMON
    + """
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    cursor, rates = 0, []
    for step in range(5):
        x, y = DATA[cursor:cursor + 4], TARGET[cursor:cursor + 4]
        cursor += 4
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        LOSSES.append(loss.item())
    say(losses=LOSSES, rates=rates, cursor=cursor)
    """
)


def test_a_plain_loop_with_a_cursor_of_its_own(observe: Any) -> None:
    observed = observe(PLAIN, sample_steps=[2])
    observed.is_whole()
    said = _said(observed)
    assert observed.column("stepped", "step") == [1, 2, 3, 4, 5]
    assert _losses(observed) == said["losses"]
    assert [lr for (lr,) in observed.column("stepped", "lr")] == said["rates"]
    assert [c["cursor"] for c in observed.column("stepped", "counters")] == [4, 8, 12, 16, 20]
    assert [len(rows) for rows in observed.column("batch", "rows")] == [4] * 5
    assert len({row for rows in observed.column("batch", "rows") for row in rows}) == 20


def test_state_is_sampled_where_it_was_asked_for(observe: Any) -> None:
    observed = observe(PLAIN, sample_steps=[2])
    samples = [(fact["step"], fact["at"]) for fact in observed.facts("state")]
    assert [s for s in samples if s[1] == "forward"] == [(0, "forward"), (2, "forward")]
    state = observed.state(2)
    weights = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(state["weights"]) == weights
    kept = ("exp_avg", "exp_avg_sq", "step")
    assert set(state["optimizer"]) == {f"{w}.{key}" for w in weights for key in kept}
    assert {state["optimizer"][f"{w}.step"] for w in weights} == {2.0}
    (group,) = state["groups"][0]
    assert (group["hyper"]["lr"], group["hyper"]["weight_decay"]) == (0.05, 0.01)
    assert observed.state(0)["weights"] != state["weights"]


def test_gradient_accumulation_is_one_step_of_several_micro_batches(observe: Any) -> None:
    text = (
        COMMON
        + """
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        total = 0.0
        for micro in range(4):
            n = 8 * step + 2 * micro
            loss = F.mse_loss(model(DATA[n:n + 2]), TARGET[n:n + 2]) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        LOSSES.append(total)
    say(losses=LOSSES)
    """
    )
    observed = observe(text)
    observed.is_whole()
    assert observed.column("stepped", "micro_batches") == [4, 4, 4]
    assert _losses(observed) == pytest.approx(_said(observed)["losses"], rel=1e-12)
    assert observed.column("batch", "micro") == [0, 1, 2, 3] * 3
    assert observed.column("batch", "step") == [0] * 4 + [1] * 4 + [2] * 4


def test_a_scaled_loss_is_recorded_unscaled_and_an_overflow_is_a_skipped_step(observe: Any) -> None:
    text = (
        COMMON
        + """
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    before = [p.detach().clone() for p in model.parameters()]
    moved = []
    for step in range(8):
        loss = F.mse_loss(model(DATA[4 * step:][:4]), TARGET[4 * step:][:4]) * 10
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(any((a != b).any().item() for a, b in zip(before, model.parameters())))
        LOSSES.append(loss.item())
    say(losses=LOSSES, moved=moved)
    """
    )
    observed = observe(text, sample_steps=[1])
    observed.is_whole()
    said = _said(observed)
    assert said["moved"][0] is False  # the case is real: the first step did overflow
    assert said["moved"][-1] is True
    skipped = [bool(each) for each in observed.column("stepped", "skipped")]
    assert skipped[: skipped.index(False)] == [not moved for moved in said["moved"] if not moved]
    assert len(skipped) == 8
    taken = [i for i, each in enumerate(skipped) if not each]
    losses = _losses(observed)
    assert [losses[i] for i in taken] == pytest.approx([said["losses"][i] for i in taken], rel=1e-6)
    assert observed.state(1)["scalers"][0]["scale"] == pytest.approx(1.5e38)


def test_two_optimizers_make_one_step_together(observe: Any) -> None:
    text = (
        COMMON
        + """
    generator, critic = build(), nn.Linear(3, 1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01)
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=0.02)
    for step in range(4):
        real = TARGET[4 * step:][:4]
        fake = generator(DATA[4 * step:][:4])
        optimizer_d.zero_grad()
        loss_d = critic(fake.detach()).mean() - critic(real).mean()
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = -critic(fake).mean()
        loss_g.backward()
        optimizer_g.step()
        LOSSES.append([loss_d.item(), loss_g.item()])
    say(losses=LOSSES)
    """
    )
    observed = observe(text, sample_steps=[2], stop_step=3)
    observed.is_whole()
    assert observed.column("stepped", "step") == [1, 1, 2, 2, 3, 3]
    assert observed.column("stepped", "optimizer") == [1, 0] * 3
    state = observed.state(2)
    assert len(state["groups"]) == 2
    assert any(name.startswith("optimizer1:") for name in state["optimizer"])
    assert any(name.startswith("Linear:") for name in state["weights"])
    assert observed.column("stopped", "step") == [3]


def test_two_optimizers_after_one_backward_call_both_step(observe: Any) -> None:
    text = (
        COMMON
        + """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    model, head = build(), nn.Linear(3, 1)
    idle = nn.Linear(2, 2)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(head.parameters(), lr=0.02, momentum=0.9)
    later = torch.optim.Adam(idle.parameters(), lr=0.03)
    for step in range(4):
        loss = head(model(DATA[4 * step:][:4])).square().mean()
        inner.zero_grad(); outer.zero_grad()
        loss.backward()
        inner.step()
        outer.step()
        outer.step()
        get_optimizer_state_dict(idle, later)
        LOSSES.append(loss.item())
    say(losses=LOSSES)
    """
    )
    observed = observe(text, sample_steps=[2], stop_step=3)
    observed.is_whole()
    assert observed.column("stepped", "step") == [1, 1, 2, 2, 3, 3]
    assert observed.column("stepped", "optimizer") == [0, 1] * 3
    assert [len(losses) for losses in observed.column("stepped", "losses")] == [1, 0] * 3


def test_an_optimizer_that_follows_at_some_steps_is_not_waited_for(observe: Any) -> None:
    text = (
        COMMON
        + """
    model, head = build(), nn.Linear(3, 1)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(head.parameters(), lr=0.02)
    for step in range(6):
        loss = head(model(DATA[4 * step:][:4])).square().mean()
        loss.backward()
        inner.step()
        if step % 2:
            outer.step()
    """
    )
    observed = observe(text, sample_steps=[2, 3], stop_step=5)
    observed.is_whole()
    assert observed.column("stepped", "optimizer") == [0, 0, 1, 0, 0, 1, 0]
    assert observed.column("stepped", "step") == [1, 2, 2, 3, 4, 4, 5]
    assert observed.state(3)["groups"]
    assert observed.column("stopped", "step") == [5]


def test_a_compiled_model_gives_the_same_facts_as_the_plain_one(observe: Any) -> None:
    text = (
        COMMON
        + """
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    net = torch.compile(model, backend="eager") if "--compile" in sys.argv else model
    for step in range(4):
        loss = F.mse_loss(net(DATA[4 * step:][:4]), TARGET[4 * step:][:4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"] if net is not model else 0
    say(frames=frames, breaks=len(torch._dynamo.utils.counters["graph_break"]))
    """
    )
    plain = observe(text, sample_steps=[2], name="plain")
    compiled = observe(text, "--compile", sample_steps=[2], name="compiled")
    plain.is_whole()
    compiled.is_whole()
    assert _said(compiled) == {"frames": 1, "breaks": 0}  # one graph: nothing of ours is inside it
    for kind, key in (("stepped", "losses"), ("stepped", "lr"), ("batch", "rows")):
        assert compiled.column(kind, key) == plain.column(kind, key)
    for part in ("weights", "optimizer", "groups"):
        assert compiled.state(2)[part] == plain.state(2)[part]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_facts(observe: Any, reentrant: bool) -> None:
    text = (
        COMMON
        + """
    from torch.utils.checkpoint import checkpoint
    first, last = nn.Linear(6, 8), nn.Linear(8, 3)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = first, nn.Linear(8, 8), last

        def forward(self, x):
            x = self.first(x)
            if sys.argv[1] == "plain":
                return self.last(self.middle(x).tanh())
            again = lambda h: self.middle(h).tanh()
            return self.last(checkpoint(again, x, use_reentrant=sys.argv[1] == "True"))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = F.mse_loss(model(DATA[4 * step:][:4]), TARGET[4 * step:][:4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        LOSSES.append(loss.item())
    say(losses=LOSSES)
    """
    )
    plain = observe(text, "plain", sample_steps=[2], name="plain")
    checkpointed = observe(text, str(reentrant), sample_steps=[2], name="checkpointed")
    checkpointed.is_whole()
    assert _losses(checkpointed) == _said(checkpointed)["losses"] == _losses(plain)
    assert checkpointed.column("stepped", "micro_batches") == [1, 1, 1]
    assert checkpointed.column("batch", "rows") == plain.column("batch", "rows")
    assert checkpointed.state(2)["weights"] == plain.state(2)["weights"]


def test_a_loop_that_calls_autograd_itself_and_no_module(observe: Any) -> None:
    text = (
        COMMON
        + """
    weight = nn.Parameter(torch.randn(6, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(4):
        loss = F.mse_loss(DATA[4 * step:][:4] @ weight, TARGET[4 * step:][:4])
        optimizer.zero_grad()
        torch.autograd.backward([loss])
        optimizer.step()
        LOSSES.append(loss.item())
    say(losses=LOSSES)
    """
    )
    observed = observe(text, sample_steps=[2], stop_step=3)
    observed.is_whole()
    assert observed.column("stepped", "step") == [1, 2, 3]
    assert observed.column("stopped", "step") == [3]
    assert observed.state(2, at="backward")["groups"][0][0]["members"] == ["group0[0]"]


def test_calls_of_a_frozen_module_are_recorded_up_to_a_bound(observe: Any) -> None:
    text = (
        COMMON
        + """
    frozen = nn.Linear(6, 6).requires_grad_(False)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for _ in range(300):
            x = frozen(DATA[:4])
        optimizer.zero_grad()
        F.mse_loss(model(x), TARGET[:4]).backward()
        optimizer.step()
    """
    )
    batches = observe(text).facts("batch")
    counted = [sum(b["step"] == step and "frozen" in b for b in batches) for step in (0, 1)]
    assert counted == [256, 256]
    assert sum("frozen" not in b for b in batches) == 2


def test_weights_that_are_updated_by_hand_are_told_once(observe: Any) -> None:
    text = (
        COMMON
        + """
    weight = torch.randn(6, 3, requires_grad=True)
    for step in range(130):
        F.mse_loss(DATA[:4] @ weight, TARGET[:4]).backward()
        weight = (weight - 0.1 * weight.grad).detach().requires_grad_()
    """
    )
    observed = observe(text, stop_step=3)
    assert observed.column("unstepped", "backwards") == [64]
    assert observed.facts("stepped") == []


def test_an_iterable_dataset_with_two_workers(observe: Any) -> None:
    text = (
        COMMON
        + """
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Stream(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            for n in range(info.id, 32, info.num_workers):
                yield DATA[n], TARGET[n]

    if __name__ == "__main__":
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(Stream(), batch_size=4, num_workers=2):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            LOSSES.append(loss.item())
        say(losses=LOSSES)
    """
    )
    observed = observe(text)
    observed.is_whole()
    assert _losses(observed) == _said(observed)["losses"]
    rows = [row for rows in observed.column("batch", "rows") for row in rows]
    assert len(rows) == len(set(rows)) == 32


def test_an_optimizer_of_the_users_own_keeps_its_names(observe: Any) -> None:
    text = (
        COMMON
        + """
    class Muonish(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "ns_steps": 3})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                        state["calls"] = 0
                        state["trace"] = []
                    state["momentum_buffer"].mul_(0.9).add_(p.grad)
                    state["calls"] += 1
                    state["trace"].append(float(p.grad.norm()))
                    p.sub_(group["lr"] * state["momentum_buffer"].sign())

    model = build()
    optimizer = Muonish(model.parameters())
    for step in range(3):
        loss = F.mse_loss(model(DATA[4 * step:][:4]), TARGET[4 * step:][:4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say()
    """
    )
    observed = observe(text, sample_steps=[2])
    observed.is_whole()
    state = observed.state(2)
    assert state["optimizer"]["0.weight.calls"] == 2
    assert len(state["optimizer"]["0.weight.trace"]) == 2
    assert state["optimizer"]["0.weight.momentum_buffer"][0] == "float32"
    assert state["groups"][0][0]["hyper"]["ns_steps"] == 3


def test_an_optimizer_without_rates_or_with_odd_groups_never_disturbs_the_job(observe: Any) -> None:
    text = (
        COMMON
        + """
    class Odd(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(0.1 * p.grad)

    class Loud:
        def __repr__(self):
            raise RuntimeError("do not look at me")
        def __len__(self):
            raise RuntimeError("do not count me")
        __eq__ = __hash__ = __str__ = __repr__

    model = build()
    optimizer = Odd(model.parameters())
    optimizer.param_groups[0]["secret"] = Loud()
    optimizer.param_groups[0][7] = float("nan")
    for step in range(4):
        loss = F.mse_loss(model(DATA[4 * step:][:4]), TARGET[4 * step:][:4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        LOSSES.append(loss.item())
    say(losses=LOSSES)
    """
    )
    observed = observe(text, sample_steps=[2])
    assert observed.ended["returncode"] == 0
    assert not observed.facts("crashed")
    assert observed.column("exited", "code") == [0]
    assert _losses(observed) == _said(observed)["losses"]
    assert observed.column("stepped", "lr") == [[None]] * 4


PIPELINE = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(n): nn.Linear(3, 3) for n in range(2)})
    del layers[str(1 - rank)]

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers
        def forward(self, x):
            return self.layers[str(rank)](x)

    model = Stage()
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.arange(24.0).reshape(8, 3) + 100 * step
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.zeros(8, 3), losses=[])
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""


def test_a_pipeline_shows_its_samples_once_and_its_losses_on_the_last_stage(observe: Any) -> None:
    """1F1B runs two forwards before the first backward; activations are no samples."""
    seen = observe(PIPELINE, ranks=2)
    seen.is_whole(ranks=2)
    first, last = (seen.facts("batch", rank) for rank in (0, 1))
    rows = [row for fact in first for row in fact["rows"]]
    assert [len(fact["rows"]) for fact in first] == [2] * 12
    assert len(set(rows)) == 24
    assert [fact["rows"] for fact in last] == [[]] * 12
    losses = [seen.column("stepped", "losses", rank) for rank in (0, 1)]
    assert losses[0] == [[]] * 3
    assert [len(step) for step in losses[1]] == [4] * 3
    names = [sorted(seen.state(0, rank=rank)["weights"]) for rank in (0, 1)]
    assert names == [["layers.0.bias", "layers.0.weight"], ["layers.1.bias", "layers.1.weight"]]


SHARDED_AVERAGE = """
    import copy, sys, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
        def forward(self, x):
            return self.layer(x)

    torch.manual_seed(0)
    model, average = Net(), Net()
    if sys.argv[1] == "sharded":
        dist.init_process_group("gloo")
        fully_shard(model), fully_shard(average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("how", ["plain", "sharded"])
def test_sharding_a_second_model_does_not_rename_it(how: str, observe: Any) -> None:
    """FSDP2 changes the class of what it shards; names must not follow."""
    weights = observe(SHARDED_AVERAGE, how).state(0)["weights"]
    assert sorted(weights) == [
        "Net#2:layer.bias",
        "Net#2:layer.weight",
        "layer.bias",
        "layer.weight",
    ]
