"""Find the parameters inside flat partitions: FSDP1 lays them end to end and cuts the whole.

A rank then holds a range of the row-major elements of a parameter, nothing of it, or all; what it
trains is the local part of the flat parameter (`use_orig_params=False`), or views into it under the
original names, flattened and perhaps empty. A `Fragment` says which range that is, so that weights
and moments get the digest that they have in every other layout.

In order: `named_parameters` walks a model as torch does and gives a fragment in place of what lies
in a flat partition; `Fragment.entry` digests the range in the partition itself or in a moment that
is laid out like it. Read from the attributes of `torch.distributed.fsdp._flat_param.FlatParameter`,
which are the same from torch 2.4 on. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union

import torch

from . import fingerprint


@dataclass(frozen=True, eq=False)
class Fragment:
    """What this rank holds of one parameter in a flat partition.

    `whole` is what the optimizer knows: elements `offset … offset + size` of it are the elements
    from `start` on of the flattened parameter of `shape`; with a `slab`, of that slab of it, which
    is what a tensor-parallel rank flattened. Two tied names share one fragment.
    """

    whole: torch.Tensor
    shape: tuple[int, ...]
    start: int
    offset: int
    size: int
    slab: fingerprint.Slab | None = None
    mixed: bool = False  # a part of a tensor that is itself cut: of which elements is not known

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self.whole.requires_grad

    @property
    def is_meta(self) -> bool:
        """Whether it has no bytes yet."""
        return self.whole.is_meta

    def entry(self, values: torch.Tensor) -> fingerprint.Entry:
        """The fingerprint entry of this parameter in `values`: `whole`, or what is laid out like
        it.

        Raises TypeError when it is laid out in another way.
        """
        if tuple(values.shape) == self.shape and not self.mixed:
            return fingerprint.entry(values)  # not sharded, or not at the moment
        return fingerprint.flat_entry(self._of(values), self.shape, self.start, self.slab)

    def project(self, values: torch.Tensor | None = None) -> list[float]:
        """The projections of this parameter in `values` (default: `whole`), as
        `fingerprint.project` gives them. Raises TypeError as `entry` does.
        """
        values = self.whole if values is None else values
        if tuple(values.shape) == self.shape and not self.mixed:
            return fingerprint.project(values)
        return fingerprint.flat_project(self.part_of(values), self.shape, self.start, self.slab)

    def part_of(self, values: torch.Tensor) -> torch.Tensor:
        """The elements of this parameter in `values`, flattened. Raises TypeError as `entry`."""
        if tuple(values.shape) == self.shape and not self.mixed:
            return values.detach().reshape(-1)
        return self._of(values)

    def _of(self, values: torch.Tensor) -> torch.Tensor:
        flat = values.detach().reshape(-1)
        if self.mixed or flat.numel() != self.whole.numel():
            raise TypeError(f"{list(values.shape)} is not laid out like the flat partition")
        if self.offset + self.size > flat.numel():
            raise TypeError("the flat partition is not in the layout that it is trained in")
        return flat[self.offset : self.offset + self.size]


Parameter = Union[torch.Tensor, Fragment]
Inside = dict[int, dict[str, Parameter]]
"""id of what an optimizer knows -> the parameters in it, by name."""


def named_parameters(root: Any) -> Iterator[tuple[str, Parameter]]:
    """As `root.named_parameters(remove_duplicate=False)`, with a `Fragment` for each parameter that
    lies in a flat partition, also where only the partition is registered.
    """
    fragments = _fragments(root)
    if not fragments:
        yield from root.named_parameters(remove_duplicate=False)
        return
    for path, module in root.named_modules(remove_duplicate=False):
        own: dict[str, Parameter] = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and not _is_flat(parameter)
        }
        for name, parameter in {**own, **fragments.get(id(module), {})}.items():
            yield (f"{path}.{name}" if path else name), parameter


def _is_flat(parameter: Any) -> bool:
    return hasattr(parameter, "_shard_param_infos")


def _fragments(root: Any) -> dict[int, dict[str, Fragment]]:
    """By id of the module that a parameter belongs to, and by its name there."""
    found: dict[int, dict[str, Fragment]] = {}
    for module in root.modules():
        handle = module.__dict__.get("_handle")
        flat = getattr(handle, "flat_param", None)
        if flat is None or not _is_flat(flat):
            continue
        for position, (name, owner, _) in enumerate(flat._param_infos):
            found.setdefault(id(owner), {})[name] = _fragment(flat, position)
        for name, owner, _, first_name, first_owner, _ in flat._shared_param_infos:
            found.setdefault(id(owner), {})[name] = found[id(first_owner)][first_name]
    return found


def _fragment(flat: Any, position: int) -> Fragment:
    shape, slab, mixed = _place(flat, position)
    place = flat._shard_param_infos[position]
    start, offset, size = 0, 0, 0
    if place.in_shard:
        start, offset = place.intra_param_start_idx, place.offset_in_shard
        size = place.numel_in_shard
    views = flat._params
    if views is None:
        return Fragment(flat, shape, start, offset, size, slab, mixed)
    return Fragment(views[position], shape, start, 0, size, slab, mixed)


def _place(flat: Any, position: int) -> tuple[tuple[int, ...], fingerprint.Slab | None, bool]:
    """Shape of a parameter, the slab of it that was flattened (None: all of it), and whether that
    cannot be told.

    Of a DTensor its local tensor is flattened, and its spec is kept as an extension.
    """
    local = tuple(int(size) for size in flat._shapes[position])
    spec = flat._param_extensions[position]
    if spec is None:
        return local, None, False
    placements: Any = getattr(spec, "placements", ())
    coordinate: Any = spec.mesh.get_coordinate() if len(placements) == 1 else None
    kind = type(placements[0]).__name__ if coordinate is not None else ""
    if kind not in ("Replicate", "Shard"):
        return local, None, True
    shape = [int(size) for size in spec.shape]
    if kind == "Replicate":
        return tuple(shape), None, tuple(shape) != local
    dim, index = int(placements[0].dim), int(coordinate[0])
    each = -(-shape[dim] // int(spec.mesh.size(0)))  # as torch.chunk cuts it
    offset = min(each * index, shape[dim])
    length = min(each, shape[dim] - offset)
    held = (*shape[:dim], length, *shape[dim + 1 :])
    return tuple(shape), (dim, offset, length), held != local
