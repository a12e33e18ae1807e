"""Describe the gradient that an optimizer is handed: what the state and the samples make of a step.

From equal state and equal samples the first gradient is the same in exact arithmetic, whatever the
topology, so it tells a training that goes on otherwise from rounding. In order: the watch asks at a
few steps after a restore, just before an optimizer steps (after clipping and un-scaling); each
parameter's gradient is described where it lies, by the parameter's name, as a saved tensor is: its
place and digest, its projections, and behind those the sum of its squares, which tells the size of
parts that nobody can place. How exact all that can be depends on the coarsest type of number on
the way back, which is looked up in the autograd graph. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import fingerprint, flat
from .zero import Flats, Piece

_MAX_NODES = 20_000  # of an autograd graph that are looked at


def leaves(
    optimizer: Any, members: Iterable[tuple[Any, dict[str, flat.Parameter]]]
) -> dict[str, Any]:
    """`{"inp.weight": {"entry": entry, "projection": [8 projections, sum of squares]}}` of what an
    optimizer steps on itself. `members` is what `state.members` returns.
    """
    found: dict[str, Any] = {}
    with torch.no_grad():
        for whole, inside in members:
            gradient = _gradient(whole)
            if gradient is not None:
                for name, parameter in inside.items():
                    leaf = _leaf(gradient, parameter)
                    if leaf is not None:
                        found[name] = leaf
    return found


def of_pieces(optimizer: Any, pieces: Iterable[tuple[str, Piece]], flats: Flats) -> dict[str, Any]:
    """The same of the pieces of flat tensors that an engine lets the optimizer step on now."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[str, Any] = {}
    with torch.no_grad():
        for name, piece in pieces:
            gradient = piece.flat.grad
            if id(piece.flat) in held and gradient is not None:
                place = flats.cut(piece, gradient)
                numbers = [*fingerprint.flat_project(*place), fingerprint.square(place[0])]
                found[name] = {"entry": fingerprint.flat_entry(*place), "projection": numbers}
    return found


def dtypes(roots: Iterable[Any]) -> set[str]:
    """The floating-point types on the way from a loss to the parameters, as autograd knows them.

    What is recomputed or compiled is one node to it; the types at its border count then.
    """
    found: set[str] = set()
    waiting = [r.grad_fn for r in roots if isinstance(r, torch.Tensor) and r.grad_fn is not None]
    seen = {id(node) for node in waiting}
    nodes = list(waiting)  # an id stands for a node as long as that lives
    while waiting and len(nodes) < _MAX_NODES:
        node = waiting.pop()
        for about in getattr(node, "_input_metadata", ()):
            dtype = getattr(about, "dtype", None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                found.add(str(dtype).replace("torch.", "", 1))
        for following, _ in node.next_functions:
            if following is not None and id(following) not in seen:
                seen.add(id(following))
                nodes.append(following)
                waiting.append(following)
    return found


def _gradient(parameter: Any) -> Any:
    """What is stepped with: `main_grad` is where Megatron and others accumulate in float32."""
    gradient = getattr(parameter, "grad", None)
    gradient = getattr(parameter, "main_grad", None) if gradient is None else gradient
    return gradient if isinstance(gradient, torch.Tensor) else None


def _leaf(gradient: torch.Tensor, parameter: flat.Parameter) -> dict[str, Any] | None:
    """None for a gradient without readable bytes (sparse ones, say)."""
    try:
        if isinstance(parameter, flat.Fragment):
            entry, numbers = parameter.entry(gradient), parameter.project(gradient)
            local = parameter.part_of(gradient)
        else:
            entry, numbers = fingerprint.entry(gradient), fingerprint.project(gradient)
            local = getattr(gradient, "_local_tensor", gradient)
        return {"entry": entry, "projection": [*numbers, fingerprint.square(local)]}
    except TypeError:
        return None
