"""Gives the moments of an optimizer that torch stored by index the names of their parameters.

`torch.optim` numbers parameters in the order in which the job handed them over, which for most jobs
is the order of the model's own state dict. That is taken for granted only where nothing speaks
against it: one parameter group, weights and moments in one file, and the shapes fit in exactly one
way. Otherwise the index stays the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptdrill.formats.kinds import Kind, Sort
from ckptdrill.formats.layout import TensorMeta

Shape = tuple[int, ...]
Entry = tuple[str, Sort, TensorMeta]


def resolved(entries: Sequence[Entry], groups: Iterable[Sort]) -> Mapping[str, str]:
    """The name of each index, from tensors in stored order; nothing when it is not certain."""
    if any(not sort.name.startswith("param_groups.0.") for sort in groups):
        return {}
    weights = [(sort.name, t.shape) for _, sort, t in entries if sort.kind is Kind.WEIGHT]
    moments: dict[str, Shape] = {}
    for _, sort, tensor in entries:
        if sort.kind is Kind.MOMENT and sort.name.isdecimal() and tensor.shape:
            moments.setdefault(sort.name, tensor.shape)
    indices = sorted(moments, key=int)
    wanted = [moments[index] for index in indices]
    first = _fitted(weights, wanted)
    last = _fitted(weights[::-1], wanted[::-1])
    if first is None or last is None or first != last[::-1]:
        return {}
    return dict(zip(indices, first, strict=True))


def _fitted(weights: Sequence[tuple[str, Shape]], wanted: Sequence[Shape]) -> list[str] | None:
    """The first weights in order that have the wanted shapes; None when some have no weight."""
    waiting = iter(weights)
    found = [next((name for name, shape in waiting if shape == length), None) for length in wanted]
    names = [name for name in found if name is not None]
    return names if len(names) == len(wanted) else None
