"""What the observer tells of the gradient that an optimizer is handed, in real loops; and the
launches in which random layers are silent.
"""

import json
import math
from typing import Any

import pytest

from tests.observer.test_observer_loops import COMMON

pytestmark = pytest.mark.e2e

LOOP = (
    COMMON
    + """
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    for step in range(4):
        x, y = DATA[4 * step:4 * step + 4], TARGET[4 * step:4 * step + 4]
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        sizes.append(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters()))
        optimizer.step()
    say(sizes=sizes)
"""
)


def test_the_gradient_is_told_as_it_is_stepped_with_at_the_steps_that_were_asked_for(
    observe: Any,
) -> None:
    seen = observe(LOOP, gradient_steps=[2])
    seen.is_whole()
    facts = seen.facts("gradient")
    assert [fact["of"] for fact in facts] == [1, 3]
    assert {fact["drawn"] for fact in facts} == {False}
    assert facts[0]["dtypes"] == ["float32"]
    sizes = json.loads(seen.out().splitlines()[-1])["sizes"]
    for fact in facts:
        square = sum(leaf["projection"][-1] for leaf in fact["leaves"].values())
        assert square == pytest.approx(sizes[fact["of"] - 1], rel=1e-9)
        assert math.sqrt(square) == pytest.approx(0.01, rel=1e-4)


DROPPING = LOOP.replace(
    "model = build()",
    "model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))",
)


def test_random_layers_show_as_numbers_drawn_and_are_silent_where_that_is_asked_for(
    observe: Any,
) -> None:
    loud = observe(DROPPING)
    quiet = observe(DROPPING, name="quiet", quiet=True)
    assert loud.facts("gradient")[0]["drawn"] is True
    assert quiet.facts("gradient")[0]["drawn"] is False
    layers = quiet.facts("outputs")[0]["layers"]
    assert set(layers) == {"the model", "0", "1", "2"}
    assert layers["0"][:2] == [8, 4]
    assert layers["0"][2] == layers["1"][2]
    assert not loud.facts("outputs")


NOISY = (
    COMMON
    + """
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            self.recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        def forward(self, x):
            x = F.dropout(self.first(x), 0.5)
            x = x * torch.bernoulli(torch.full((len(x), 1), 0.8))
            x = x + x.new_empty(len(x), 1).bernoulli_(0.5)
            x = x + torch.randn_like(x) + torch.rand_like(x)
            heads = self.recurrent(x[:, None])[0][:, None]
            mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
            return self.last(mixed[:, 0, 0])
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = DATA[:4] + torch.bernoulli(torch.full((4, 6), 0.5)) + torch.randn_like(DATA[:4])
    kept = x.sum().item()
    optimizer.zero_grad()
    F.mse_loss(model(x), TARGET[:4]).backward()
    optimizer.step()
    say(samples=kept, rate=model.recurrent.dropout)
"""
)


def test_what_draws_inside_a_model_is_silent_and_samples_keep_their_noise(observe: Any) -> None:
    loud = observe(NOISY)
    first, again = (
        observe(NOISY, name="first", quiet=True),
        observe(NOISY, name="again", quiet=True),
    )
    (one,), (two,) = first.facts("gradient"), again.facts("gradient")
    assert one["leaves"] == two["leaves"]
    said = [json.loads(each.out().splitlines()[-1]) for each in (loud, first, again)]
    assert said[0] == said[1] == said[2]
    assert first.facts("outputs")[0]["layers"].keys() >= {"first", "recurrent", "last"}


def test_autocast_shows_as_the_coarsest_type_on_the_way_back(observe: Any) -> None:
    text = LOOP.replace(
        "F.mse_loss(model(x), y).backward()",
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "            loss = F.mse_loss(model(x).float(), y)\n"
        "        loss.backward()",
    )
    assert "bfloat16" in observe(text).facts("gradient")[0]["dtypes"]


def test_a_closure_computes_the_gradient_inside_the_step(observe: Any) -> None:
    text = (
        LOOP.replace("optimizer.step()", "")
        .replace(
            "F.mse_loss(model(x), y).backward()",
            "def closure():\n"
            "            loss = F.mse_loss(model(x), y)\n"
            "            loss.backward()\n"
            "            return loss\n"
            "        optimizer.step(closure)",
        )
        .replace("nn.utils.clip_grad_norm_(model.parameters(), 0.01)", "")
    )
    assert [fact["of"] for fact in observe(text).facts("gradient")] == [1]


PIPELINE = (
    COMMON
    + """
    first, second = nn.Linear(6, 8), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        held = [first(DATA[8 * step + 4 * n:8 * step + 4 * n + 4]) for n in range(2)]
        outs = [F.mse_loss(second(h), TARGET[:4]) for h in held]
        for loss in outs:
            (loss / 2).backward()
        optimizer.step()
    say(done=True)
"""
)


def test_several_forwards_before_a_backward_are_several_micro_batches(observe: Any) -> None:
    seen = observe(PIPELINE)
    rows = [fact["rows"] for fact in seen.facts("batch") if fact["step"] == 0]
    assert [len(each) for each in rows] == [4, 4]
    assert len({row for each in rows for row in each}) == 8


def test_what_a_gradient_flows_back_through_is_no_sample(observe: Any) -> None:
    text = PIPELINE.replace(
        "first(DATA[8 * step + 4 * n:8 * step + 4 * n + 4])",
        ("first(DATA[8 * step + 4 * n:8 * step + 4 * n + 4].clone().requires_grad_())"),
    )
    facts = observe(text).facts("batch")
    assert all(not fact["rows"] for fact in facts)
    assert len(facts[0]["activations"]) == 4
