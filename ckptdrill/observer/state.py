"""Describe all the state of a training process as plain JSON, tensors by their digests.

Weights and buffers by canonical name, optimizer state and hyper-parameters by parameter name,
schedulers, scalers, and the random state of this rank. Nothing is moved between ranks: a sharded
tensor is described by its local shard with its place in the global tensor, and the judge adds up.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from . import fingerprint, flat, gradients, movable
from .columns import Columns
from .names import Roots, own_class
from .zero import Flats, Piece

_BY_MODE = (
    torch.nn.modules.dropout._DropoutNd,
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.RReLU,
)
# What a tensor raises that has no bytes to read, or that is asked for what it cannot do.
UNREADABLE = (TypeError, NotImplementedError, RuntimeError)
_NUMPY_GENERATORS = ("Generator", "RandomState")


def describe(
    roots: Roots,
    optimizers: Iterable[Any],
    schedulers: Iterable[Any],
    scalers: Iterable[Any],
    columns: Columns,
    *,
    projected: bool,
    moves: bool = False,
) -> dict[str, Any]:
    """The whole state, tensors in columns, with or without projections; see below for each part.

    `moves` asks for digests that the judge can move, of what no framework has cut.
    """
    known = roots.by_parameter()
    optimizers = list(optimizers)
    flats = Flats(module for _, module in roots.modules)
    schedulers = [*schedulers]
    schedulers += [s for s in flats.schedulers() if all(s is not known for known in schedulers)]
    with torch.no_grad():
        return {
            "weights": columns.of({n: _weight(p, flats) for n, p in roots.parameters()}),
            "broadcast_buffers": any(
                getattr(module, "broadcast_buffers", False) for _, module in roots.modules
            ),
            "buffers": columns.of({name: entry(b) for name, b, _ in roots.buffers()}),
            "optimizer": columns.of(optimizer_state(optimizers, known, flats)),
            "groups": [_groups(optimizer, known, flats, columns) for optimizer in optimizers],
            "projections": columns.of(_projections(roots, flats)) if projected else {},
            **({"movable": columns.of(_movable(roots, optimizers, flats))} if moves else {}),
            "schedulers": [_plain_state(s, optimizers) for s in schedulers],
            "scalers": [*(plain(s.state_dict()) for s in scalers), *map(plain, flats.scalers())],
        }


def kinds(roots: Roots) -> dict[str, Any]:
    """What does not change from step to step: frozen and tied parameters, buffer persistence."""
    by_id: dict[int, list[str]] = {}
    frozen = []
    held = list(roots.parameters())  # an id stands for an object as long as that lives
    for name, parameter in held:
        by_id.setdefault(id(parameter), []).append(name)
        if not parameter.requires_grad:
            frozen.append(name)
    return {
        "frozen": frozen,
        "tied": [group for group in by_id.values() if len(group) > 1],
        "non_persistent": [name for name, _, persistent in roots.buffers() if not persistent],
        "parameters": len(by_id),
        "wrappers": sorted(roots.wrappers),
        "cut": _declared_cuts(held),
        "classes": [own_class(type(module)).__name__ for _, module in roots.modules],
        "eval": [name for name, layer in roots.layers() if _evaluates(layer)],
    }


def _evaluates(layer: Any) -> bool:
    """Whether a layer is in eval mode to which that makes a difference: it draws random numbers or
    keeps statistics, or is a module of the user's own that asks for its mode.
    """
    if layer.training:
        return False
    if isinstance(layer, _BY_MODE):
        return getattr(layer, "p", 1.0) != 0.0
    if isinstance(layer, (torch.nn.RNNBase, torch.nn.MultiheadAttention)):
        return bool(layer.dropout)
    code = getattr(type(layer).forward, "__code__", None)
    return code is not None and "training" in code.co_names


def _declared_cuts(held: Iterable[tuple[str, flat.Parameter]]) -> dict[str, list[int]]:
    """Name -> dimension and stride along which Megatron says that it has cut a parameter."""
    return {
        name: [int(p.partition_dim), int(getattr(p, "partition_stride", 1))]
        for name, p in held
        if getattr(p, "tensor_model_parallel", False) is True and hasattr(p, "partition_dim")
    }


def _movable(roots: Roots, optimizers: list[Any], flats: Flats) -> dict[str, list[Any]]:
    """`{"weights:up": entry}`: movable digests of what no framework has cut (`movable`)."""
    known = roots.by_parameter()
    found: dict[str, Any] = {
        f"weights:{n}": p for n, p in roots.parameters() if not flats.is_cut(p)
    }
    found.update((f"buffers:{n}", b) for n, b, _ in roots.buffers())
    for position, optimizer in enumerate(optimizers):
        prefix = f"optimizer:optimizer{position}:" if position else "optimizer:"
        state = getattr(inner(optimizer), "state", {})
        for whole, inside in members(optimizer, known, flats):
            for key, value in (state.get(whole, {}) or {}).items():
                for name, parameter in inside.items():
                    if not isinstance(parameter, flat.Fragment):
                        found[f"{prefix}{name}.{key}"] = value
    return movable.entries(found)


def random_state(generators: dict[str, Any] | None = None) -> dict[str, str]:
    """One digest per generator: python, numpy (when in use), torch, the CUDA device, and the
    generator objects of the job by the name it holds them under.
    """
    found = {
        "python": digest(repr(random.getstate()).encode()),
        "torch": digest(bytes(torch.get_rng_state().tolist())),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        found["numpy"] = digest(repr((name, rest)).encode() + keys.tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        state = torch.cuda.get_rng_state(device)
        found["cuda"] = digest(bytes(state.tolist()))
    for name, generator in (generators or {}).items():
        found[name] = digest(_generator_state(generator))
    return found


def drawn_from() -> tuple[str, ...]:
    """Where torch's own generators stand, which random layers draw from."""
    found = random_state()
    return tuple(found.get(kind, "") for kind in ("torch", "cuda"))


def is_generator(value: Any) -> bool:
    """True for generator objects of torch, NumPy and the standard library."""
    kind = type(value)
    if isinstance(value, torch.Generator) or kind is random.Random:
        return True
    return kind.__module__.startswith("numpy.random") and kind.__name__ in _NUMPY_GENERATORS


def _generator_state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return repr(generator.getstate()).encode()
    holder = getattr(generator, "bit_generator", generator)
    kept = holder.state if hasattr(holder, "state") else holder.get_state()
    return repr(plain(kept)).encode()


def learning_rates(optimizer: Any) -> list[Any]:
    """The LR of every group, as the optimizer really uses it now."""
    return [plain(group.get("lr")) for group in getattr(optimizer, "param_groups", [])]


def plain(value: Any, depth: int = 0) -> Any:
    """Any state leaf as JSON: exact floats, tensors as entries, callables and modules left out."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if depth > 8:
        return f"<{type(value).__name__}>"
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: (type(item[0]).__name__, str(item[0])))
        return {
            repr(k) if not isinstance(k, str) else k: plain(v, depth + 1)
            for k, v in items
            if not callable(v)
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [plain(item, depth + 1) for item in ordered]
    if isinstance(value, bytes):
        return f"bytes:{digest(value)}"
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # NumPy scalars
        return plain(value.item(), depth + 1)
    if hasattr(value, "tobytes"):
        return f"{value.dtype}{list(value.shape)}:{digest(value.tobytes())}"
    return f"<{type(value).__name__}>"


def _plain_tensor(tensor: torch.Tensor) -> Any:
    """Tensors without a dimension as numbers, so that a person can read `step 5`; everything else
    as an entry: of a vector of one element a rank may hold none, where it is cut.
    """
    if fingerprint.is_sharded(tensor):
        return entry(tensor)
    local = getattr(tensor, "_local_tensor", tensor)
    if tensor.dim() == 0 and not local.is_complex():
        return plain(local.item())
    return entry(tensor)


def _projections(roots: Roots, flats: Flats) -> dict[str, list[float]]:
    """Layout-free projections of the trained parameters: differences of two give an update's size
    and direction without keeping a tensor.
    """
    trained = {n: p for n, p in roots.parameters() if p.requires_grad and not p.is_meta}
    found = {name: _projection(parameter, flats) for name, parameter in trained.items()}
    return {name: numbers for name, numbers in found.items() if numbers is not None}


def _projection(parameter: flat.Parameter, flats: Flats) -> list[float] | None:
    try:
        if isinstance(parameter, flat.Fragment):
            return parameter.project()
        return flats.projection(parameter) or fingerprint.project(parameter)
    except UNREADABLE:
        return None


def _weight(parameter: flat.Parameter, flats: Flats) -> Any:
    return flats.weight(parameter) or entry(parameter)


def entry(tensor: flat.Parameter) -> Any:
    """The fingerprint entry of a tensor. What has no bytes to digest (meta, sparse), or cannot do
    what is asked of it (subclasses of the user's), is named as such.
    """
    try:
        if isinstance(tensor, flat.Fragment):
            return tensor.entry(tensor.whole)
        return fingerprint.entry(tensor)
    except UNREADABLE as error:
        return f"<not digested: {error}>"


def optimizer_state(optimizers: list[Any], known: flat.Inside, flats: Flats) -> dict[str, Any]:
    """`{"embed.weight.exp_avg": entry, "embed.weight.step": 5.0}`; a later
    optimizer is prefixed. `known` is what `Roots.by_parameter` returns.
    """
    found: dict[str, Any] = {}
    for position, optimizer in enumerate(optimizers):
        prefix = f"optimizer{position}:" if position else ""
        state = getattr(inner(optimizer), "state", {})
        for name, piece in pieces(optimizer, known, flats):
            for key, value in flats.state(optimizer, piece).items():
                found[f"{prefix}{name}.{key}"] = plain(value)
        for whole, inside in members(optimizer, known, flats):
            for key, value in (state.get(whole, {}) or {}).items():
                for name, parameter in inside.items():
                    found[f"{prefix}{name}.{key}"] = _of_parameter(value, parameter)
    return found


def gradient(optimizer: Any, known: flat.Inside, flats: Flats, number: int) -> dict[str, Any]:
    """What `gradients.leaves` tells of the gradient that an optimizer is about to step with, under
    the names of `optimizer_state`; `number` is its place among the optimizers.
    """
    prefix = f"optimizer{number}:" if number > 0 else ""
    found = gradients.leaves(optimizer, members(optimizer, known, flats))
    found |= gradients.of_pieces(optimizer, pieces(optimizer, known, flats), flats)
    return {prefix + name: leaf for name, leaf in found.items()}


def inner(optimizer: Any) -> Any:
    """The optimizer that holds the state of this one: `ZeroRedundancyOptimizer` steps another on
    what its rank owns, and what its own `state` holds after a load is an unused copy.
    """
    held = getattr(optimizer, "optim", None)
    return held if isinstance(held, torch.optim.Optimizer) else optimizer


def _of_parameter(value: Any, parameter: flat.Parameter) -> Any:
    """What one value of an optimizer's state is for a parameter: of a flat moment, its part."""
    flat_moment = isinstance(value, torch.Tensor) and value.dim() > 0
    if not isinstance(parameter, flat.Fragment) or not flat_moment:
        return plain(value)
    try:
        return parameter.entry(value)
    except UNREADABLE as error:
        return f"<not digested: {error}>"


def pieces(optimizer: Any, known: flat.Inside, flats: Flats) -> list[tuple[str, Piece]]:
    """What an engine lets an optimizer step on in flat tensors, by the name of the parameter."""
    return [
        (next(iter(known.get(id(p.parameter), {})), "(unnamed)"), p) for p in flats.of(optimizer)
    ]


def members(
    optimizer: Any, known: flat.Inside, flats: Flats
) -> list[tuple[Any, dict[str, flat.Parameter]]]:
    """What an optimizer steps on itself, and the parameters in each by name."""
    if flats.of(optimizer):
        return []
    groups = enumerate(getattr(optimizer, "param_groups", []))
    return [member for g, group in groups for member in _of_group(g, group, known)]


def _of_group(
    number: int, group: dict[str, Any], known: flat.Inside
) -> list[tuple[Any, dict[str, flat.Parameter]]]:
    return [
        (whole, known.get(id(whole), {f"group{number}[{position}]": whole}))
        for position, whole in enumerate(group["params"])
    ]


def _groups(
    optimizer: Any, known: flat.Inside, flats: Flats, columns: Columns
) -> list[dict[str, Any]]:
    """Hyper-parameters by group; its members are the id of a layout that lists them.

    The last group is of pieces that no group of the optimizer holds any more, if there are any.
    """
    groups = []
    held = pieces(optimizer, known, flats)
    for g, group in enumerate(getattr(optimizer, "param_groups", [])):
        listed = [name for name, piece in held if piece.group == g]
        if not held:
            listed = [name for _, inside in _of_group(g, group, known) for name in inside]
        values = {k: plain(v) for k, v in group.items() if k != "params" and not callable(v)}
        groups.append({"members": columns.names(listed), "hyper": values})
    orphans = [name for name, piece in held if piece.group < 0]
    if orphans:
        groups.append({"members": columns.names(orphans), "hyper": {"trained": False}})
    return groups


def _plain_state(scheduler: Any, optimizers: list[Any]) -> dict[str, Any]:
    """The scheduler's own state, and which optimizer it drives (-1: one nobody steps)."""
    driven = getattr(scheduler, "optimizer", None)
    position = next((i for i, o in enumerate(optimizers) if o is driven), -1)
    return {
        "class": type(scheduler).__name__,
        "drives": position,
        "state": plain(scheduler.state_dict()),
    }


def digest(data: bytes) -> str:
    """32 hex digits of some bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
