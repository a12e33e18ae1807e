"""Models are named in the order of the optimizers, and found through copies of their weights."""

from typing import Self

import pytest
import torch
from torch import nn

from ckptdrill.observer import fingerprint, state
from ckptdrill.observer.names import copies_of, find_roots, stand_for


def labels(*modules: nn.Module, optimized: list[nn.Module]) -> list[str]:
    parameters = [p for module in optimized for p in module.parameters()]
    roots = find_roots({id(p): n for n, p in enumerate(parameters)})
    by_id = {id(module): label for label, module in roots.modules}
    return [by_id[id(module)] for module in modules]


def test_a_module_that_joins_the_optimizer_later_does_not_rename_the_first() -> None:
    backbone, head = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)
    before = labels(head, optimized=[head])
    after = labels(head, backbone, optimized=[head, backbone])
    assert before == after[:1] == [""]
    assert after[1]


def test_a_list_of_all_layers_that_were_dealt_out_is_no_model_of_its_own() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    stage = nn.ModuleDict({"1": layers[1]})
    roots = find_roots({id(p): n for n, p in enumerate(stage.parameters())})
    names = {id(module): label for label, module in roots.modules}
    assert names[id(stage)] == ""
    assert id(layers) not in names


def test_a_list_with_frozen_layers_stays() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)])
    head = nn.Sequential(layers[1])
    roots = find_roots({id(p): n for n, p in enumerate(head.parameters())})
    assert any(module is layers for _, module in roots.modules)


def masters(module: nn.Module) -> list[torch.Size]:
    return [p.shape for p in module.parameters()]


@pytest.mark.parametrize(
    ("copies", "world_size", "stands"),
    [
        ([torch.Size([3, 2]), torch.Size([3])], 1, True),  # one by one
        ([torch.Size([9])], 1, True),  # end to end
        ([torch.Size([5])], 2, True),  # a rank's slice, padded at the end
        ([torch.Size([5])], 1, False),
        ([torch.Size([3, 2])], 1, False),
        ([], 1, False),
    ],
)
def test_copies_stand_for_the_module_that_has_as_much(
    copies: list[torch.Size], world_size: int, *, stands: bool
) -> None:
    assert stand_for(copies, nn.Linear(2, 3), world_size) is stands


def test_only_what_is_in_no_module_is_a_copy() -> None:
    module = nn.Linear(2, 3)
    apart = [p.detach().clone().requires_grad_() for p in module.parameters()]
    inside = torch.optim.SGD(module.parameters(), lr=0.1)
    outside = torch.optim.SGD(apart, lr=0.1)
    assert copies_of([inside, outside]) == [masters(module)]


class Bits8(torch.Tensor):
    """A tensor that is made of two others and does nothing."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object, **__: object) -> None:
        raise NotImplementedError(func)


def test_a_tensor_that_is_made_of_others_is_told_by_them() -> None:
    codes, scale = torch.arange(6, dtype=torch.int8), torch.tensor(0.5)
    one, same = Bits8(codes, scale), Bits8(codes.clone(), scale.clone())
    other = Bits8(codes, torch.tensor(0.25))
    assert fingerprint.entry(one) == fingerprint.entry(same) != fingerprint.entry(other)
    assert fingerprint.entry(one)[:2] == ["float32", [6]]
    with pytest.raises(TypeError, match="made of other tensors"):
        fingerprint.project(one)


class Refuses(torch.Tensor):
    """A tensor of which nothing can be read."""

    def __new__(cls) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object, **__: object) -> None:
        raise NotImplementedError(func)


def test_a_tensor_that_refuses_costs_its_own_entry_alone() -> None:
    assert str(state.entry(Refuses())).startswith("<not digested:")


def test_a_vector_of_one_element_is_no_number_for_a_rank_may_hold_none_of_it() -> None:
    assert state.plain(torch.tensor(5.0)) == 5.0
    assert state.plain(torch.tensor([5.0]))[1] == [1]
