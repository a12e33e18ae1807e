"""What the user's code holds that is laid out like the weights, and under which name."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckptdrill.observer import copies
from ckptdrill.observer import fingerprint as fp
from ckptdrill.observer.names import Roots


class Ema:
    def __init__(self, shadow: Any) -> None:
        self.shadow = shadow
        self.decay = 0.9


class Slotted:
    __slots__ = ("unset", "values")

    def __init__(self, values: Any) -> None:
        self.values = values


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3))


def clones(net: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name: p.detach().clone() for name, p in net.named_parameters()}


def found(net: nn.Module, **held: Any) -> dict[str, Any]:
    names = copies.find(sys._getframe(), Roots([("", weakref.ref(net))]))
    return {name: leaves for name, leaves in names.items() if name.startswith("held")}


def test_a_copy_by_name_is_told_by_digest_and_projection() -> None:
    net = model()
    average = clones(net)
    (leaves,) = found(net, ema=average).values()
    assert list(leaves) == [name for name, _ in net.named_parameters()]
    assert leaves["0.weight"]["entry"] == fp.entry(average["0.weight"])
    *projection, square = leaves["0.weight"]["projection"]
    assert projection == fp.project(average["0.weight"])
    assert square == pytest.approx(float(average["0.weight"].square().sum()))


@pytest.mark.parametrize(
    ("name", "hold"),
    [
        ("held[ema]", lambda average: average),
        ("held[ema]", OrderedDict),
        ("held[ema]", lambda average: list(average.values())),
        ("held[ema]", lambda average: tuple(average.values())),
        ("held[ema]", lambda average: {7 + i: v for i, v in enumerate(average.values())}),
        ("held[ema].shadow", Ema),
        ("held[ema].values", Slotted),
        ("held[ema][0].shadow", lambda average: [Ema(average)]),
        ("held[ema][late].shadow", lambda average: {"late": Ema(average)}),
    ],
)
def test_a_copy_is_found_where_jobs_keep_it(name: str, hold: Any) -> None:
    net = model()
    assert list(found(net, ema=hold(clones(net)))) == [name]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_do_not_hide_a_copy(prefix: str) -> None:
    net = model()
    assert next(iter(found(net, ema=clones(net, prefix))["held[ema]"])) == "0.weight"


def test_a_copy_may_hold_more_than_the_parameters_and_leave_some_out() -> None:
    net = model()
    average = {**clones(net), "counter": torch.zeros((), dtype=torch.int64)}
    del average["0.bias"]
    assert set(found(net, ema=average)["held[ema]"]) == {"0.weight", "2.weight", "2.bias"}


def test_what_is_the_models_own_is_no_copy() -> None:
    net = model()
    net(torch.ones(1, 3)).sum().backward()
    assert (
        found(
            net,
            parameters=dict(net.named_parameters()),
            state=net.state_dict(),
            gradients=[p.grad for p in net.parameters()],
            views=[p.detach() for p in net.parameters()],
            model=net,
        )
        == {}
    )


def test_what_is_laid_out_otherwise_is_no_copy() -> None:
    net = model()
    values = list(clones(net).values())
    assert (
        found(
            net,
            fewer=values[:1],
            more=[*values, torch.ones(1)],
            turned=values[::-1],
            whole=[v.to(torch.int64) for v in values],
            elsewhere=[v.to("meta") for v in values],
            numbers=list(range(4)),
            empty={},
        )
        == {}
    )


def test_odd_objects_are_left_alone() -> None:
    class Loud:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("asked")

        def __len__(self) -> int:
            raise RuntimeError("asked")

    net = model()
    itself: list[Any] = []
    itself.append(itself)
    held = {"loud": Loud(), "itself": itself, "queue": deque([1]), "space": SimpleNamespace(a=1)}
    assert found(net, **held) == {}


def test_one_object_under_two_names_is_told_once() -> None:
    net = model()
    average = clones(net)
    assert list(found(net, one=average, other=Ema(average))) == ["held[one]"]
