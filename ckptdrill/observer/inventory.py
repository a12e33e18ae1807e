"""The job's own inventory: every leaf it hands to a save call, and every leaf a load gives it.

Nothing needs to be known about a leaf: a custom cursor, an average of the weights in a plain dict
and
a curriculum counter are all found because the job itself saves them. Tensors are described by their
digest and, where they are floating point, by a projection, so that two of them can be compared
within
a tolerance without being stored; everything else is described by value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import fingerprint, movable, state

_MAX_LEAVES = 50_000
_MAX_TEXT = 200


def leaves(value: Any) -> dict[str, Any]:
    """`{"model.embed.weight": leaf}` over nested dicts, lists and state-dict objects."""
    found: dict[str, Any] = {}
    with torch.no_grad():
        _collect("", value, found, 0)
    return found


def numbers_of(tensor: torch.Tensor) -> list[float]:
    """The projections of a floating-point tensor, and behind them the sum of its squares: that is
    how large parts are together, which nobody can place.
    """
    local = getattr(tensor, "_local_tensor", tensor)
    size = 0.0 if fingerprint.is_sharded(tensor) else fingerprint.square(local)
    return [*fingerprint.project(tensor), size]


def movable_leaves(value: Any) -> dict[str, Any]:
    """The movable entries of the plain tensors among the leaves, under the same keys."""
    found: dict[str, Any] = {}
    _collect("", value, found, 0, lambda each: each)
    return movable.entries(found)


def leaf(value: Any) -> Any:
    """One leaf: a number or short text as it is, a tensor as `{"entry": …, "projection": […]}`."""
    if isinstance(value, torch.Tensor):
        return _tensor_leaf(value)
    described = state.plain(value)
    if isinstance(described, str) and len(described) > _MAX_TEXT:
        return f"text:{state.digest(described.encode())}"
    return described


def _tensor_leaf(tensor: torch.Tensor) -> Any:
    sharded = fingerprint.is_sharded(tensor)
    local = tensor if sharded else getattr(tensor, "_local_tensor", tensor)
    if not sharded and tensor.dim() == 0 and not local.is_complex():
        return state.plain(local.item())
    described: dict[str, Any] = {"entry": state.entry(tensor)}
    whole = isinstance(described["entry"], list) and not fingerprint.components(local)
    if whole and local.dtype.is_floating_point:
        described["projection"] = numbers_of(tensor)
    return described


def _collect(
    path: str,
    value: Any,
    found: dict[str, Any],
    depth: int,
    described: Callable[[Any], Any] = leaf,
) -> None:
    if len(found) >= _MAX_LEAVES:
        return
    children = _children(value) if depth < 16 else None
    if children is None:
        found[path or "value"] = described(value)
        return
    for key, child in children:
        _collect(f"{path}.{key}" if path else str(key), child, found, depth + 1, described)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """The named parts of a container; None for a leaf. Long lists of numbers are one leaf."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)) and any(_is_container(item) for item in value):
        return list(enumerate(value))
    if hasattr(value, "state_dict") and callable(value.state_dict):
        return _children(value.state_dict())
    return None


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, torch.Tensor)) or hasattr(value, "state_dict")
