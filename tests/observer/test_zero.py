"""The pieces of DeepSpeed's flat tensors belong to the right elements of the right parameters.

Fake objects with the attributes of the engine's optimizers: what a fragment, a partition and a slab
say is arithmetic. A flat tensor that is read one element off, or a piece that is looked up in the
wrong group, gives another sum of digests than the undivided tensor has.
"""

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ckptdrill.observer import fingerprint, zero
from ckptdrill.observer.names import Roots, find_roots
from ckptdrill.observer.state import describe

RANKS = 2
SHAPES = ((5, 3), (7,), (4, 2, 2))


class Model(torch.nn.Module):
    """Three weights in two groups, one that is not trained, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(100.0)
        for number, shape in enumerate(SHAPES):
            weight = values[: torch.Size(shape).numel()].reshape(shape) + 100 * number
            self.register_parameter(f"w{number}", torch.nn.Parameter(weight))
        self.frozen = torch.nn.Parameter(values[:3].clone(), requires_grad=False)
        self.register_buffer("mean", values[:2].clone())


class Engine(torch.nn.Module):
    """What the observer takes for an engine."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = None


@dataclass
class Columns:
    """Leaves as they are, in place of columns."""

    listed: list[list[str]] = field(default_factory=list)

    def of(self, leaves: dict[str, Any]) -> dict[str, Any]:
        return leaves

    def names(self, names: list[str]) -> list[str]:
        return names


@pytest.fixture(autouse=True)
def _deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(zero.sys.modules, "deepspeed.runtime.engine", module)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group)  # a group is a rank


def _groups(model: Model) -> list[list[torch.nn.Parameter]]:
    return [[model.w0, model.w2], [model.w1]]


def _adam(flats: list[torch.Tensor]) -> torch.optim.AdamW:
    """An optimizer that has made a step on these flat tensors."""
    groups = [
        {"params": [flat], "lr": 0.1 * (n + 1), "weight_decay": 0.5 * n}
        for n, flat in enumerate(flats)
    ]
    optimizer = torch.optim.AdamW(groups)
    for flat in flats:
        moment = flat.detach() * 2
        optimizer.state[flat] = {"step": torch.tensor(3.0), "exp_avg": moment}
    return optimizer


def _padded(tensors: list[torch.Tensor], multiple: int) -> torch.Tensor:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return torch.cat([flat, flat.new_full((-len(flat) % multiple,), -1.0)])


def _flat(rank: int, groups: list[list[torch.nn.Parameter]]) -> list[torch.Tensor]:
    """Every group is one flat tensor, padded and cut into equal partitions."""
    flats = []
    for group in groups:
        whole = _padded(group, 2 * RANKS)
        size = len(whole) // RANKS
        flats.append(whole[rank * size : (rank + 1) * size].clone().requires_grad_())
    return flats


def _stage_2(
    rank: int, order: tuple[int, int] = (0, 1), *, offsets: bool = True
) -> tuple[Engine, torch.optim.AdamW]:
    """`order` is that of the first group's parameters in its flat tensor."""
    model = Model()
    groups = _groups(model)
    lie = [[groups[0][n] for n in order], groups[1]]
    optimizer = _adam(_flat(rank, lie))
    wrapper = SimpleNamespace(
        bit16_groups=groups,
        round_robin_bit16_groups=lie,
        real_dp_process_group=[rank, rank],
        single_partition_of_fp32_groups=[g["params"][0] for g in optimizer.param_groups],
        optimizer=optimizer,
    )
    if offsets:
        wrapper.round_robin_bit16_offsets = [[0, lie[0][0].numel()], [0]]
    return Engine(model, wrapper), optimizer


def _dealt_out(rank: int) -> tuple[Engine, torch.optim.AdamW]:
    return _stage_2(rank, (1, 0))


def _older(rank: int) -> tuple[Engine, torch.optim.AdamW]:
    return _stage_2(rank, offsets=False)


def _fragmented(rank: int) -> tuple[Engine, torch.optim.AdamW]:
    """Every parameter knows its fragment."""
    model = Model()
    groups = _groups(model)
    optimizer = _adam(_flat(rank, groups))
    flats = [group["params"][0] for group in optimizer.param_groups]
    for group, flat in zip(groups, flats, strict=True):
        size, begin = len(flat), 0
        for parameter in group:
            low, high = max(begin, rank * size), min(begin + parameter.numel(), (rank + 1) * size)
            here = SimpleNamespace(start=low - begin, numel=high - low)
            there = SimpleNamespace(start=low - rank * size, numel=high - low)
            mapping = SimpleNamespace(lp_fragment_address=here, hp_fragment_address=there)
            parameter._hp_mapping = mapping if low < high else None
            begin += parameter.numel()
    wrapper = SimpleNamespace(
        bf16_groups=groups, fp32_groups_flat_partition=flats, optimizer=optimizer
    )
    return Engine(model, wrapper), optimizer


def _stage_3(rank: int) -> tuple[Engine, torch.optim.AdamW]:
    """Every parameter is padded and cut by itself; the flat tensors are rows of such parts."""
    model = Model()
    groups = _groups(model)
    for parameter in model.parameters():
        whole = _padded([parameter], RANKS)
        size = len(whole) // RANKS
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.ds_tensor = whole[rank * size : (rank + 1) * size].clone()
        parameter.ds_tensor.ds_numel = size
        parameter.ds_zero_partition_rank = rank
        parameter.data = torch.empty(0)
    flats = [torch.cat([p.ds_tensor for p in group]).requires_grad_() for group in groups]
    optimizer = _adam(flats)
    for group in optimizer.param_groups:
        group["params"] = []  # as between two steps
    wrapper = SimpleNamespace(
        fp16_groups=groups,
        fp32_partitioned_groups_flat=flats,
        sub_group_to_group_id={0: 0, 1: 1},
        optimizer=optimizer,
    )
    return Engine(model, wrapper), optimizer


def _stage_0_half(rank: int) -> tuple[Engine, torch.optim.AdamW]:
    """Whole groups, flat: every rank has all of them."""
    model = Model()
    groups = _groups(model)
    flats = [_padded(group, 1).requires_grad_() for group in groups]
    optimizer = _adam(flats)
    wrapper = SimpleNamespace(fp16_groups=groups, fp32_groups_flat=flats, optimizer=optimizer)
    return Engine(model, wrapper), optimizer


def _master_copies(rank: int) -> tuple[Engine, torch.optim.AdamW]:
    """A master of each parameter, in its shape."""
    model = Model()
    groups = _groups(model)
    masters = [[p.detach().clone().requires_grad_() for p in group] for group in groups]
    optimizer = _adam([m for group in masters for m in group])
    rates = [(0.1, 0.0), (0.2, 0.5)]
    optimizer.param_groups = [
        {"params": group, "lr": lr, "weight_decay": decay}
        for group, (lr, decay) in zip(masters, rates, strict=True)
    ]
    wrapper = SimpleNamespace(fp16_groups=groups, fp32_groups=masters, optimizer=optimizer)
    return Engine(model, wrapper), optimizer


BUILDS = {
    "2": _stage_2,
    "2, dealt out": _dealt_out,
    "2, before 0.19": _older,
    "fragments": _fragmented,
    "3": _stage_3,
    "half": _stage_0_half,
    "masters": _master_copies,
}


def _described(build: Any) -> list[dict[str, Any]]:
    found = []
    for rank in range(RANKS):
        engine, optimizer = build(rank)
        roots = Roots([("", lambda engine=engine: engine)])
        found.append(describe(roots, [optimizer], [], [], Columns(), projected=True))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("kind", BUILDS)
def test_the_pieces_of_all_ranks_add_up_to_the_undivided_tensors(kind: str) -> None:
    ranks, whole = _described(BUILDS[kind]), Model()
    for name in ("w0", "w1", "w2"):
        weight = getattr(whole, name)
        expected = {
            "fp32": fingerprint.entry(weight)[4],
            "exp_avg": fingerprint.entry(weight.detach() * 2)[4],
        }
        for key, digest in expected.items():
            entries = [state["optimizer"][f"{name}.{key}"] for state in ranks]
            assert fingerprint.combine(entries) == digest
            assert {tuple(entry[1]) for entry in entries} == {tuple(weight.shape)}
        assert [state["optimizer"][f"{name}.step"] for state in ranks] == [3.0, 3.0]
    for name, parameter in whole.named_parameters():
        entries = [state["weights"][name] for state in ranks]
        assert fingerprint.combine(entries) == fingerprint.entry(parameter)[4]


@pytest.mark.parametrize("kind", BUILDS)
def test_every_rank_tells_all_members_of_the_groups_that_train_them(kind: str) -> None:
    for state in _described(BUILDS[kind]):
        groups = state["groups"][0]
        assert [group["members"] for group in groups] == [["w0", "w2"], ["w1"]]
        assert [group["hyper"]["lr"] for group in groups] == pytest.approx([0.1, 0.2])
        assert [group["hyper"]["weight_decay"] for group in groups] == [0.0, 0.5]


def test_a_partitioned_weight_is_projected_as_it_is_undivided() -> None:
    ranks, whole = _described(_stage_3), Model()
    for name in ("w0", "w1", "w2"):
        parts = torch.tensor([state["projections"][name] for state in ranks]).sum(0)
        assert parts.tolist() == pytest.approx(fingerprint.project(getattr(whole, name)))


def test_a_piece_that_no_group_holds_is_trained_by_none() -> None:
    engine, optimizer = _stage_2(0)
    optimizer.param_groups[1]["params"] = [torch.zeros(4)]  # a copy: the flat one stands still
    roots = Roots([("", lambda: engine)])
    state = describe(roots, [optimizer], [], [], Columns(), projected=False)  # type: ignore[arg-type]
    assert state["groups"][0][-1] == {"members": ["w1"], "hyper": {"trained": False}}


def test_a_fragment_that_is_one_element_off_is_another_digest() -> None:
    engine, optimizer = _fragmented(0)
    engine.module.w0._hp_mapping.hp_fragment_address.start += 1
    roots = Roots([("", lambda: engine)])
    state = describe(roots, [optimizer], [], [], Columns(), projected=False)  # type: ignore[arg-type]
    assert state["optimizer"]["w0.fp32"] != _described(_fragmented)[0]["optimizer"]["w0.fp32"]


def test_an_engine_is_the_first_root_though_its_optimizer_holds_none_of_its_parameters() -> None:
    engine, _ = _stage_2(0)
    other = Model()
    found = find_roots({})
    labels = {id(module): label for label, module in found.modules}
    assert labels[id(engine)] == ""
    assert labels[id(other)]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_of_slabs_add_up_to_the_undivided_tensor(dim: int, dtype: torch.dtype) -> None:
    shape = (5, 12, 3)
    whole = torch.arange(180.0).reshape(shape).to(dtype)
    entries, projections = [], []
    for offset, length in ((0, 2), (2, shape[dim] - 2)):
        local = whole.narrow(dim, offset, length).reshape(-1)
        for begin, end in ((0, 7), (7, 8), (8, len(local)), (len(local), len(local))):
            at = (local[begin:end], shape, begin, (dim, offset, length))
            entries.append(fingerprint.flat_entry(*at))
            projections.append(fingerprint.flat_project(*at))
    assert fingerprint.combine(entries) == fingerprint.entry(whole)[4]
    added = torch.tensor(projections, dtype=torch.float64).sum(0).tolist()
    assert added == pytest.approx(fingerprint.project(whole))


def test_a_split_weight_is_placed_in_the_weight_that_it_is_a_slab_of() -> None:
    whole, sizes = torch.arange(35.0).reshape(5, 7), (4, 3)
    entries = []
    for index in range(2):
        layer = torch.nn.Linear(1, 1, bias=False)
        layer.weight = torch.nn.Parameter(whole.split(sizes, dim=1)[index].contiguous())
        layer._partition_sizes, layer.tp_index = sizes, index
        split = {"partition_dim": 1, "logical_shape": (5, 7), "replicated": False}
        layer.weight.ds_autotp_universal_checkpoint_meta = split
        flats = zero.Flats([Engine(layer, torch.optim.SGD(layer.parameters(), lr=0.1))])
        entries.append(flats.weight(layer.weight))
    assert fingerprint.combine(entries) == fingerprint.entry(whole)[4]


@pytest.mark.parametrize(
    ("optimizer", "scale"),
    [
        (SimpleNamespace(dynamic_loss_scale=True, loss_scaler=SimpleNamespace(cur_scale=8.0)), 8.0),
        (
            SimpleNamespace(
                loss_scale_config=SimpleNamespace(dynamic_loss_scale=True, cur_scale=4.0)
            ),
            4.0,
        ),
        (SimpleNamespace(dynamic_loss_scale=True, cur_scale=2.0), 2.0),
        (SimpleNamespace(dynamic_loss_scale=False, loss_scaler=SimpleNamespace(cur_scale=1)), None),
        (SimpleNamespace(loss_scale_config=SimpleNamespace(dynamic_loss_scale=False)), None),
        (SimpleNamespace(), None),
    ],
)
def test_a_loss_scale_that_moves_is_told_wherever_it_is_kept(
    optimizer: SimpleNamespace, scale: float | None
) -> None:
    told = zero.Flats([Engine(Model(), optimizer)]).scalers()
    assert [each["scale"] for each in told] == ([] if scale is None else [scale])
