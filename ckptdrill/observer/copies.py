"""Find copies of the weights that a job keeps for itself: a moving average in a dict or list.

Such an average is no module, and a job that forgets to save it shows it nowhere else. In order:
walk what the user's frames on the stack and the user's modules hold, and what is a few names below
it; take each dict, list or tuple of tensors whose names, or else whose shapes in order, are those
of a model's parameters; leave out what shares memory with them. Which of these is state shows in
how they change from step to step, and the judge looks at that: nothing here knows it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from . import inventory, program, state
from .names import WRAPPER_PARTS, Roots

_DEPTH = 4
_MAX_VISITED = 4_000
_MAX_LENGTH = 100_000  # of a container
_MAX_ITEMS = 64  # of a container that are walked into
_OF_A_LIBRARY = re.compile(r"ema|average|shadow", re.IGNORECASE)
_PARTS = re.compile(rf"\b({'|'.join(WRAPPER_PARTS)})\.")

Tensors = dict[str, torch.Tensor]


def find(frame: Any, roots: Roots) -> dict[str, dict[str, Any]]:
    """`{"job.ema": {"inp.weight": leaf}}`: every copy by the name that the job holds it under, its
    leaves (with projections, as a saved leaf has them) by the name of the parameter.
    """
    models = [parameters for parameters in _models(roots) if parameters]
    found: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for name, held in _walk(frame):
        tensors = next((t for model in models if (t := _matched(held, model))), None)
        if tensors and id(held) not in seen and name not in found:
            seen.add(id(held))
            found[name] = {key: _leaf(tensor) for key, tensor in tensors.items()}
    return found


def _leaf(tensor: torch.Tensor) -> Any:
    entry = state.entry(tensor)
    if not isinstance(entry, list):
        return entry
    return {"entry": entry, "projection": inventory.numbers_of(tensor)}


def _models(roots: Roots) -> Iterator[Tensors]:
    """The whole or sharded parameters of each model; those inside flat partitions have no shape."""
    for label, module in roots.modules:
        part = Roots([(label, lambda module=module: module)])
        named = dict(part.parameters())
        yield {n: p for n, p in named.items() if isinstance(p, torch.Tensor) and not p.is_meta}


def _matched(held: Any, model: Tensors) -> Tensors | None:
    """The tensors of a container by the parameters that they are copies of, or None."""
    values = list(dict.values(held) if _is(held, dict) else held)
    if not any(_is(value, torch.Tensor) for value in values[:4]):
        return None
    trained = {name: p for name, p in model.items() if p.requires_grad}
    pairs = _by_name(held, model) if _is(held, dict) else {}
    pairs = pairs or _in_order(values, model) or _in_order(values, trained)
    if 2 * len(pairs.keys() & trained.keys()) <= len(trained) or _shares(pairs, model):
        return None
    return pairs


def _by_name(held: dict[Any, Any], model: Tensors) -> Tensors:
    items = list(dict.items(held))
    named = {_PARTS.sub("", key): value for key, value in items if type(key) is str}
    labels = {name.rpartition(":")[2]: name for name in model}
    return {
        labels[key]: value
        for key, value in named.items()
        if key in labels and _is_copy(value, model[labels[key]])
    }


def _in_order(values: list[Any], model: Tensors) -> Tensors:
    if len(values) != len(model):
        return {}
    pairs = list(zip(model.items(), values))
    alike = all(_is_copy(value, parameter) for (_, parameter), value in pairs)
    return {name: value for (name, _), value in pairs} if alike else {}


def _is_copy(value: Any, parameter: torch.Tensor) -> bool:
    return (
        _is(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.dtype.is_floating_point
        and value.layout is torch.strided
        and not value.is_meta
    )


def _shares(pairs: Tensors, model: Tensors) -> bool:
    """Whether any of them is a parameter or its gradient under another name."""
    own = {_address(p) for p in model.values()}
    own |= {_address(p.grad) for p in model.values() if p.grad is not None}
    return any(_address(tensor) in own for tensor in pairs.values() if tensor.numel())


def _address(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).data_ptr()


# ------------------------------------------------------------------------ what the job's code holds


def _walk(frame: Any) -> Iterator[tuple[str, Any]]:
    """(name, container) of what the user's code holds, innermost frames first, each object once."""
    visited: set[int] = set()
    for variables in program.held_by_the_user(frame):
        for name, value in variables.items():
            if not name.startswith("__"):
                label = type(value).__name__ if name == "self" else name
                yield from _below(label, value, visited, _DEPTH)


def _below(name: str, value: Any, visited: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    children = _children(name, value)
    if children is None or not depth or id(value) in visited or len(visited) >= _MAX_VISITED:
        return
    visited.add(id(value))
    if type(value) in (list, tuple) or _is(value, dict):
        yield name, value
    for label, child in children:
        yield from _below(label, child, visited, depth - 1)


def _children(name: str, value: Any) -> list[tuple[str, Any]] | None:
    """What is held one name below; None for what holds nothing of interest."""
    kind = type(value)
    if kind in (list, tuple) or _is(value, dict):
        if not 0 < len(value) <= _MAX_LENGTH:
            return None
        items = list(dict.items(value) if _is(value, dict) else enumerate(value))
        # A name is made of short keys only: some keys are objects that are long to print.
        return [
            (f"{name}[{_key(key, place)}]", v) for place, (key, v) in enumerate(items[:_MAX_ITEMS])
        ]
    if _is(value, torch.Tensor) or _is(value, torch.nn.Module) or not _is_of_interest(kind):
        return None
    return [(f"{name}.{key}", item) for key, item in program.fields(value)]


def _key(key: Any, place: int) -> str:
    return key if type(key) is str else str(key if type(key) is int else place)


def _is(value: Any, kind: type) -> bool:
    """By its type alone: some objects answer `isinstance` with code of their own."""
    return issubclass(type(value), kind)


def _is_of_interest(kind: type) -> bool:
    """Classes of the user, and those of libraries that keep averages."""
    if kind.__module__.partition(".")[0] in sys.builtin_module_names:
        return False
    return program.of_the_user(kind) or bool(_OF_A_LIBRARY.search(kind.__name__))
