"""Read what DeepSpeed trains out of its flat tensors, parameter by parameter.

Under ZeRO the job's optimizer steps on one flat float32 partition per group and rank, and its state
knows no parameter. Which part of it belongs to which parameter is told by the engine's optimizer:
the order of a group and the rank in stages 1 and 2, the partitions of stage 3. Every such *piece*
is looked up in the live flat tensor, in the live optimizer's state and in the live group that holds
it, never in a copy or a file: what counts is what the parameter is really trained with.
Tensor-parallel weights are placed in the weight that they are a slab of. So the digests of all
ranks add up to those of the undivided tensors, whatever stage, number of ranks or tensor-parallel
degree they come from.

DeepSpeed is reached through the modules that the job has imported, and only read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Place = tuple[list[int], Any]
    """Shape of a logical tensor, and the slab of it that this process has (None: all of it)."""

_ENGINE_MODULE = "deepspeed.runtime.engine"
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_TENSOR_PARALLEL = "ds_autotp_universal_checkpoint_meta"


@dataclass(frozen=True)
class Piece:
    """What this rank trains of one parameter: ``flat[at : at + numel]`` are its elements from
    `start` on, in row-major order.

    `group` is the position of its group among those of the live optimizer, -1 where no group holds
    the flat tensor, so that nothing trains the piece.
    """

    parameter: Any
    flat: torch.Tensor
    at: int
    numel: int
    start: int
    group: int


def is_engine(module: Any) -> bool:
    """True for an engine of DeepSpeed."""
    found = sys.modules.get(_ENGINE_MODULE)
    return found is not None and isinstance(module, getattr(found, "DeepSpeedEngine", ()))


def innermost(optimizer: Any) -> Any:
    """The optimizer of torch inside the one of the engine."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            return optimizer
        optimizer = inner
    return optimizer


def pieces(optimizer: Any) -> list[Piece]:
    """The pieces that this rank trains through the engine's `optimizer`; empty where that steps on
    the parameters themselves.

    A parameter of which the rank has nothing is there with no elements, so that every rank tells
    the same names.
    """
    # Attributes of the engine's optimizers: groups of parameters, and the flat tensor of each.
    kinds = (
        ("fp16_groups", "fp32_partitioned_groups_flat", _partitioned),  # stage 3
        ("round_robin_bit16_groups", "single_partition_of_fp32_groups", _cut_evenly),  # 1 and 2
        ("bf16_groups", "fp32_groups_flat_partition", _fragments),  # BF16_Optimizer
        ("fp16_groups", "fp32_groups_flat", _in_a_row),  # FP16_Optimizer
        ("fp16_groups", "fp32_groups", _alone),  # FP16_UnfusedOptimizer
    )
    for groups, flats, read in kinds:
        if hasattr(optimizer, groups) and hasattr(optimizer, flats):
            pairs = zip(getattr(optimizer, groups), getattr(optimizer, flats))
            return [
                p for n, (group, flat) in enumerate(pairs) for p in read(optimizer, n, group, flat)
            ]
    return []


def _cut_evenly(
    optimizer: Any, number: int, group: Iterable[Any], flat: torch.Tensor
) -> Iterator[Piece]:
    """Stages 1 and 2: the parameters lie one behind the other, perhaps with padding, and are cut
    into one partition for each rank.

    Read from the order in which they really lie, which `round_robin_gradients` makes another one
    than the group's. (`_hp_mapping` follows the group's then, and is wrong.)
    """
    owner = _group_of(optimizer, flat)
    begin = flat.numel() * torch.distributed.get_rank(optimizer.real_dp_process_group[number])
    told = getattr(optimizer, "round_robin_bit16_offsets", None)  # not before DeepSpeed 0.19
    offsets: dict[int, int] = {}
    end = 0
    for position, parameter in enumerate(group):
        offsets[id(parameter)] = told[number][position] if told else end
        end = offsets[id(parameter)] + parameter.numel()
    for parameter in optimizer.bit16_groups[number]:
        offset = offsets[id(parameter)]
        low, high = max(offset, begin), min(offset + parameter.numel(), begin + flat.numel())
        if low < high:
            yield Piece(parameter, flat, low - begin, high - low, low - offset, owner)
        else:
            yield Piece(parameter, flat, 0, 0, 0, owner)


def _fragments(optimizer: Any, _: int, group: Iterable[Any], flat: torch.Tensor) -> Iterator[Piece]:
    """Each parameter knows where its fragment is, in itself and in the flat tensor."""
    owner = _group_of(optimizer, flat)
    for parameter in group:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            yield Piece(parameter, flat, 0, 0, 0, owner)
        else:
            there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield Piece(parameter, flat, there.start, there.numel, here.start, owner)


def _in_a_row(optimizer: Any, _: int, group: Iterable[Any], flat: torch.Tensor) -> Iterator[Piece]:
    """Whole parameters, one behind the other."""
    at, owner = 0, _group_of(optimizer, flat)
    for parameter in group:
        yield Piece(parameter, flat, at, parameter.numel(), 0, owner)
        at += parameter.numel()


def _alone(
    optimizer: Any, _: int, group: Iterable[Any], masters: Iterable[torch.Tensor]
) -> Iterator[Piece]:
    """A master copy of each parameter."""
    for parameter, master in zip(group, masters):
        yield Piece(parameter, master, 0, parameter.numel(), 0, _group_of(optimizer, master))


def _partitioned(
    optimizer: Any, number: int, group: Iterable[Any], flat: torch.Tensor
) -> Iterator[Piece]:
    """Stage 3: each rank has an equal part of every parameter, the last ones padded or empty.

    Between steps the groups of the optimizer hold nothing, so the engine's own table says which
    group a flat tensor is put into when it is stepped.
    """
    at, owner = 0, optimizer.sub_group_to_group_id[number]
    for parameter in group:
        start, numel = _partition(parameter)
        yield Piece(parameter, flat, at, numel, start, owner)
        at += parameter.ds_tensor.ds_numel


def _partition(parameter: Any) -> tuple[int, int]:
    """Where this rank's part of a partitioned parameter begins, and how many elements it has."""
    size = int(parameter.ds_tensor.ds_numel)
    rank = getattr(parameter, "ds_zero_partition_rank", None)
    if rank is None:
        rank = torch.distributed.get_rank(parameter.ds_process_group)
    start = min(rank * size, int(parameter.ds_numel))
    return start, min(size, int(parameter.ds_numel) - start)


def _group_of(optimizer: Any, flat: torch.Tensor) -> int:
    """The position of the live group that holds this very tensor; -1 where none does."""
    groups = enumerate(innermost(optimizer).param_groups)
    return next((g for g, group in groups if any(p is flat for p in group["params"])), -1)


class Flats:
    """The engines of the job and their pieces, as they are at one moment."""

    def __init__(self, modules: Iterable[Any]) -> None:
        self.engines = [module for module in modules if is_engine(module)]
        self._places = {key: at for engine in self.engines for key, at in _slabs(engine)}
        self._pieces = {
            id(innermost(engine.optimizer)): pieces(engine.optimizer) for engine in self.engines
        }

    def of(self, optimizer: Any) -> list[Piece]:
        """The pieces that an optimizer of torch steps on; empty for ordinary parameters."""
        return self._pieces.get(id(optimizer), [])

    def state(self, optimizer: Any, piece: Piece) -> dict[str, Any]:
        """`fp32` (the master copy) and the optimizer's state of one piece, cut out of the flat
        tensors: tensors of their shape as entries, all other values as they are.
        """
        held = optimizer.state.get(piece.flat, {})
        found: dict[str, Any] = {"fp32": self._entry(piece, piece.flat)}
        for key, value in held.items():
            cut = isinstance(value, torch.Tensor) and value.shape == piece.flat.shape
            found[key] = self._entry(piece, value) if cut and value.dim() else value
        return found

    def weight(self, parameter: Any) -> Any:
        """The entry of a parameter that is partitioned or a slab; None for an ordinary one."""
        local = self._local(parameter)
        return None if local is None else fingerprint.flat_entry(*local)

    def is_cut(self, parameter: Any) -> bool:
        """Whether a parameter is partitioned or a slab."""
        return self._local(parameter) is not None

    def projection(self, parameter: Any) -> list[float] | None:
        """The projection of such a parameter; None for an ordinary one."""
        local = self._local(parameter)
        return None if local is None else fingerprint.flat_project(*local)

    def scalers(self) -> list[dict[str, Any]]:
        """The state of loss scales that move (a static scale is configuration)."""
        found = (_moving_scale(engine.optimizer) for engine in self.engines)
        return [scale for scale in found if scale is not None]

    def schedulers(self) -> list[Any]:
        """The engines' schedulers, which need not be torch's."""
        held = [getattr(engine, "lr_scheduler", None) for engine in self.engines]
        return [scheduler for scheduler in held if hasattr(scheduler, "state_dict")]

    def cut(self, piece: Piece, flat: torch.Tensor) -> tuple[torch.Tensor, list[int], int, Any]:
        """A piece in what is laid out like its flat tensor, as arguments of a fingerprint."""
        shape, slab = self._place(piece.parameter)
        held = flat.detach().reshape(-1)[piece.at : piece.at + piece.numel]
        return held, shape, piece.start, slab

    def _entry(self, piece: Piece, flat: torch.Tensor) -> Any:
        return fingerprint.flat_entry(*self.cut(piece, flat))

    def _local(self, parameter: Any) -> tuple[torch.Tensor, list[int], int, Any] | None:
        """What this process has of a parameter, as arguments of a fingerprint."""
        shape, slab = self._place(parameter)
        if hasattr(parameter, "ds_tensor"):
            start, numel = _partition(parameter)
            return parameter.ds_tensor.detach().reshape(-1)[:numel], shape, start, slab
        return None if slab is None else (parameter.detach().reshape(-1), shape, 0, slab)

    def _place(self, parameter: Any) -> Place:
        if id(parameter) in self._places:
            return self._places[id(parameter)]
        return [int(size) for size in getattr(parameter, "ds_shape", parameter.shape)], None


def _moving_scale(optimizer: Any) -> dict[str, Any] | None:
    """The state of a dynamic loss scale, wherever an engine's optimizer keeps it; None without."""
    held = getattr(optimizer, "loss_scaler", None)  # ZeRO
    if held is not None and getattr(optimizer, "dynamic_loss_scale", False):
        return {"scale": getattr(held, "cur_scale", None), **vars(held)}
    # Stage 0: in its configuration, in releases before that in the optimizer itself.
    held = getattr(optimizer, "loss_scale_config", optimizer)
    if not getattr(held, "dynamic_loss_scale", False):
        return None
    state = {name: getattr(held, name, None) for name in _SCALE}
    return {"scale": state["cur_scale"], **state}


def _slabs(engine: Any) -> Iterator[tuple[int, Place]]:
    """(id of a parameter, its place) of the weights that tensor parallelism has split.

    A layer that is split evenly or not says what all ranks have; its index says which is ours.
    """
    for layer in engine.module.modules():
        for parameter in layer._parameters.values():
            split = getattr(parameter, _TENSOR_PARALLEL, None) or {}
            dim, shape = split.get("partition_dim"), split.get("logical_shape")
            sizes = getattr(layer, "_partition_sizes", None)
            if dim is None or not shape or not sizes or split.get("replicated"):
                continue
            index = int(layer.tp_index)
            slab = (int(dim), int(sum(sizes[:index])), int(sizes[index]))
            yield id(parameter), ([int(size) for size in shape], slab)
