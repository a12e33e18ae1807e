"""Flat partitions: a parameter inside one gets the digest that it has in every other layout.

First the walk over a model whose partition is made by hand, then real FSDP1 on two ranks, with the
original parameters and without, against the same training on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed.tensor import Shard

from ckptdrill.judge.logical import is_entry
from ckptdrill.observer import fingerprint as fp
from ckptdrill.observer import flat, inventory, state
from ckptdrill.observer.names import Roots, find_roots
from tests.observer.conftest import Observe, Observed


class Half(nn.Module):
    """Rank `rank` of two of a partition of `weight` (3, 5) and `bias` (3,), padded to 20."""

    def __init__(self, rank: int, *, views: bool) -> None:
        super().__init__()
        whole = torch.arange(20, dtype=torch.float32)
        partition: Any = nn.Parameter(whole[10 * rank :][:10].clone())
        places = (
            ((True, 0, 10, 0, 9), (False, None, None, None, None)),
            ((True, 0, 5, 10, 14), (True, 5, 3, 0, 2)),
        )[rank]
        names = ("in_shard", "offset_in_shard", "numel_in_shard")
        names += ("intra_param_start_idx", "intra_param_end_idx")
        partition._shard_param_infos = [
            SimpleNamespace(**dict(zip(names, place, strict=True))) for place in places
        ]
        partition._param_infos = [("weight", self, ""), ("bias", self, "")]
        partition._shapes = [torch.Size((3, 5)), torch.Size((3,))]
        partition._shared_param_infos = [("tied", self, "", "weight", self, "")]
        partition._param_extensions = [None, None]
        partition._params = None
        if views:
            cut = [
                partition.detach()[p[1] : p[1] + p[2]] if p[0] else torch.empty(0) for p in places
            ]
            partition._params = [nn.Parameter(part) for part in cut]
            self.weight, self.bias = partition._params
        else:
            self._flat_param = partition
        object.__setattr__(self, "_handle", SimpleNamespace(flat_param=partition))
        self.own = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("views", [True, False])
def test_both_halves_add_up_to_the_whole(views: bool) -> None:
    whole = torch.arange(20, dtype=torch.float32)
    halves = [dict(flat.named_parameters(Half(rank, views=views))) for rank in (0, 1)]
    for name, value in (("weight", whole[:15].view(3, 5)), ("bias", whole[15:18])):
        parts = [half[name] for half in halves]
        assert all(isinstance(part, flat.Fragment) for part in parts)
        assert fp.combine([p.entry(p.whole) for p in parts]) == fp.entry(value)[4]
        assert fp.combine([p.entry(2 * p.whole) for p in parts]) == fp.entry(2 * value)[4]
        added = torch.tensor([part.project() for part in parts]).sum(0)
        assert added.tolist() == pytest.approx(fp.project(value))


def test_names_come_in_the_order_of_the_modules_and_ties_are_one() -> None:
    found = dict(flat.named_parameters(Half(1, views=False)))
    assert list(found) == ["own", "weight", "bias", "tied"]
    assert found["tied"] is found["weight"]
    assert isinstance(found["own"], nn.Parameter)


def test_an_optimizer_that_knows_the_partition_trains_what_lies_in_it() -> None:
    model = Half(0, views=False)
    roots = Roots([("", lambda: model)])
    known = roots.by_parameter()
    assert list(known[id(model._flat_param)]) == ["weight", "bias"]
    assert list(known[id(model.own)]) == ["own"]


def test_a_moment_in_another_layout_is_not_digested() -> None:
    part = dict(flat.named_parameters(Half(0, views=False)))["weight"]
    assert isinstance(part, flat.Fragment)
    with pytest.raises(TypeError, match="not laid out like"):
        part.entry(torch.zeros(7))


def tensor_parallel(rank: int, index: int, dim: int, *, views: bool) -> Half:
    """Half of a partition of rank `index` of two, which has a slab of a `weight` along `dim`."""
    shape = (3, 10) if dim == 1 else (6, 5)
    whole = torch.arange(30, dtype=torch.float32).view(shape)
    slab = whole.narrow(dim, shape[dim] // 2 * index, shape[dim] // 2)
    laid = torch.cat([slab.flatten(), torch.arange(5, dtype=torch.float32)])
    model = Half(rank, views=views)
    partition = model._handle.flat_param  # type: ignore[union-attr]
    partition.data.copy_(laid[10 * rank :][:10])
    mesh = SimpleNamespace(size=lambda _: 2, get_coordinate=lambda: [index])
    spec = SimpleNamespace(placements=(Shard(dim),), mesh=mesh, shape=torch.Size(shape))
    partition._param_extensions[0] = spec
    return model


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("views", [True, False])
def test_the_halves_of_each_slab_add_up_to_the_whole(dim: int, views: bool) -> None:
    whole = torch.arange(30, dtype=torch.float32).view((3, 10) if dim == 1 else (6, 5))
    parts = [
        dict(flat.named_parameters(tensor_parallel(rank, index, dim, views=views)))["weight"]
        for index in (0, 1)
        for rank in (0, 1)
    ]
    assert all(isinstance(part, flat.Fragment) for part in parts)
    assert fp.combine([p.entry(p.whole) for p in parts]) == fp.entry(whole)[4]  # type: ignore[union-attr]
    added = torch.tensor([part.project() for part in parts]).sum(0)  # type: ignore[union-attr]
    assert added.tolist() == pytest.approx(fp.project(whole))
    three = [p.entry(p.whole) for p in parts[:3]]  # type: ignore[union-attr]
    assert fp.combine(three) != fp.entry(whole)[4]


@pytest.mark.parametrize(
    "change",
    [{"placements": (Shard(0),)}, {"placements": (Shard(1), Shard(0))}, {"placements": ()}],
)
def test_a_slab_that_is_not_as_its_placement_says_is_not_digested(change: dict[str, Any]) -> None:
    model = tensor_parallel(0, 0, 1, views=False)
    extensions = model._handle.flat_param._param_extensions  # type: ignore[union-attr]
    extensions[0] = SimpleNamespace(**{**vars(extensions[0]), **change})
    part = dict(flat.named_parameters(model))["weight"]
    assert isinstance(part, flat.Fragment)
    with pytest.raises(TypeError, match="not laid out like"):
        part.entry(part.whole)


def test_what_tensor_parallelism_cut_before_is_not_digested() -> None:
    model = Half(0, views=False)
    model._handle.flat_param._param_extensions[0] = object()  # type: ignore[union-attr]
    part = dict(flat.named_parameters(model))["weight"]
    assert isinstance(part, flat.Fragment)
    with pytest.raises(TypeError, match="not laid out like"):
        part.entry(part.whole)


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_group")
def test_what_fsdp1_saves_without_a_mesh_is_described_as_the_tensor_that_it_is() -> None:
    whole = torch.arange(12, dtype=torch.float32).view(4, 3)
    half = sharded_tensor.Shard.from_tensor_and_offsets(whole[2:], [2, 0], 0)
    rest = sharded_tensor.Shard.from_tensor_and_offsets(whole[:2], [0, 0], 0)
    one, two = (
        sharded_tensor.init_from_local_shards(shards, sizes)
        for shards, sizes in (([rest], [2, 3]), ([rest, half], [4, 3]))
    )
    assert state.plain(one) == fp.entry(whole[:2])
    described = inventory.leaf(one)
    assert described == {"entry": fp.entry(whole[:2]), "projection": [*fp.project(whole[:2]), 0.0]}
    assert fp.entry(two)[1:3] == [[4, 3], ["partial", ["2 shards"], []]]


TRAINS = """
    import sys

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(13, 7)
            self.block = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
            self.head = nn.Linear(7, 13, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            h = self.embed(x)
            return self.head(h + self.block(h))

    torch.manual_seed(0)
    model, how = Net(), sys.argv[1]
    if how != "plain":
        dist.init_process_group("gloo")
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            use_orig_params=how == "views",
            device_id=torch.device("cpu"),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x = torch.arange(13)
        nn.functional.cross_entropy(model(x), (x * 3 + step) % 13).backward()
        optimizer.step()
        optimizer.zero_grad()
        if how != "plain" and step == 0:
            dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=sys.argv[2])
"""


@pytest.mark.e2e
def test_fsdp1_is_seen_as_the_same_training_on_one_rank(tmp_path: Path, observe: Observe) -> None:
    steps = {"sample_steps": [0, 2], "stop_step": 3}
    plain = observe(TRAINS, "plain", name="plain", **steps)
    seen = {
        how: observe(TRAINS, how, str(tmp_path / f"{how}.dcp"), ranks=2, name=how, **steps)
        for how in ("views", "flat")
    }
    for run in seen.values():
        run.is_whole(ranks=2)
        (saved,) = run.facts("inventory")
        assert set(saved["leaves"]) >= {"model.embed.weight", "model.block.0.weight"}
        begun = plain.state(0)
        assert _added(run, 0, "weights") == {n: e[4] for n, e in begun["weights"].items()}
        trained = plain.state(2)
        assert set(_added(run, 2, "optimizer")) == {
            name for name, value in trained["optimizer"].items() if is_entry(value)
        }
        members = [group["members"] for group in run.state(2)["groups"][0]]
        assert members == [group["members"] for group in trained["groups"][0]]
    for part in ("weights", "optimizer"):  # cut alike, summed alike: bit for bit the same
        assert _added(seen["views"], 2, part) == _added(seen["flat"], 2, part)


def _added(run: Observed, step: int, part: str) -> dict[str, str]:
    """The digest of every tensor, over both ranks."""
    states = [run.state(step, rank=rank)[part] for rank in (0, 1)]
    names = {name for state in states for name, value in state.items() if is_entry(value)}
    return {n: fp.combine([state[n] for state in states if n in state]) for n in names}


class Pipeline(nn.Module):
    """One stage of two, which keeps the list of all layers that it was made of."""

    def __init__(self) -> None:
        super().__init__()
        self._layer_specs = [nn.Linear(2, 3), nn.Linear(3, 2)]
        self.own = self._layer_specs[0]


def test_the_layers_of_other_stages_are_no_models_of_their_own() -> None:
    stage = Pipeline()
    optimized = {id(parameter): n for n, parameter in enumerate(stage.parameters())}
    found = [module for _, module in find_roots(optimized).modules]
    assert stage in found
    assert not any(layer in found for layer in stage._layer_specs)
