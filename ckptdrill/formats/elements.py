"""Reads the elements of stored tensors block by block, whatever the layout, in bounded memory.

A block is a range of the row-major tensor that is a box as well: one index in the leading
dimensions, a range in one, everything in the others. So it lies in one run of bytes in any chunk
that is a box, and in one run of elements of a flat one. Each block is put together from the chunks
that overlap it. Decoding to numbers is numpy's.

Nothing here believes the metadata: a chunk in a DCP shard must be a tensor of the same type and
shape, every element must be held by some chunk, and all chunks together may not be more than the
files could hold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ckptdrill.errors import UserError
from ckptdrill.formats import dcp, torch_save
from ckptdrill.formats.layout import ITEM_SIZE_BYTES, Chunk, TensorMeta

BLOCK_ELEMENTS = 1 << 20
# A tensor that is stored transposed is turned in memory.
_MAX_TRANSPOSED_BYTES = 64 << 20
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Mask = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Block:
    """A box of a tensor that is one range of its row-major elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def blocks(shape: tuple[int, ...], limit: int = BLOCK_ELEMENTS) -> Iterator[Block]:
    """The blocks of a shape in row-major order, none over `limit` elements, none empty."""
    if 0 in shape:
        return
    axis = next((i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= limit), None)
    if axis is None:
        yield Block((), (), 0)
        return
    inner, length = shape[axis + 1 :], shape[axis]
    step = max(limit // math.prod(inner), 1)
    start = 0
    for outer in np.ndindex(*shape[:axis]):
        for first in range(0, length, step):
            count = min(step, length - first)
            block = Block((*outer, first, *(0,) * len(inner)), (*(1,) * axis, count, *inner), start)
            yield block
            start += block.elements


class Elements:
    """The elements of one tensor, read by `block`."""

    def __init__(self, root: Path, tensor: TensorMeta) -> None:
        """Raises UserError when the files cannot hold the tensor as it is described."""
        self.root = root
        self.tensor = tensor
        self.item = ITEM_SIZE_BYTES.get(tensor.dtype, 0)
        held = sum(chunk.elements for chunk in tensor.chunks)
        if self.item == 0 or held < math.prod(tensor.shape) or (not tensor.chunks and held == 0):
            raise UserError(_why_unreadable(tensor, held))
        for chunk in tensor.chunks:
            _check_box(chunk, tensor)
        self._runs = [self._resolved(chunk) for chunk in tensor.chunks if chunk.elements]

    def _resolved(self, chunk: Chunk) -> _Run:
        path = dcp.inside(self.root, chunk.file)
        strides = self.tensor.strides
        if chunk.zipped:
            inner = torch_save.load(path, chunk.offset_bytes, chunk.length_bytes).tensors.get("")
            if inner is None or (inner.dtype, inner.shape) != (self.tensor.dtype, chunk.sizes):
                found = f"{inner.dtype} {list(inner.shape)}" if inner else "no tensor"
                wanted = f"{self.tensor.dtype} {list(chunk.sizes)}"
                raise UserError(
                    f"the shard holds {found} where the metadata says {wanted}", where=str(path)
                )
            (stored,), strides = inner.chunks or (None,), inner.strides
            if stored is None:
                raise UserError("stored as a strided view", where=str(path))
            return _Run(path, stored.offset_bytes, chunk.offsets, chunk.sizes, strides)
        size = chunk.elements * self.item
        if chunk.length_bytes < size or path.stat().st_size < chunk.offset_bytes + size:
            raise UserError("the file ends in the middle of a tensor", where=str(path))
        return _Run(path, chunk.offset_bytes, chunk.offsets, chunk.sizes, strides)

    def block(self, block: Block) -> Bytes:
        """The raw bytes of a block, row-major, as an array of shape (elements, bytes of one).

        Raises UserError when no chunk holds some of them.
        """
        target: Bytes = np.empty((*block.sizes, self.item), np.uint8)
        missing = np.ones(block.sizes, np.bool_)
        for run in self._runs:
            if self.tensor.flat:
                self._fill_flat(block, run, target.reshape(-1, self.item), missing.reshape(-1))
            else:
                self._fill_box(block, run, target, missing)
        if missing.any():
            raise UserError(f"no file holds some elements from {block.start} on")
        return target.reshape(-1, self.item)

    def _fill_flat(self, block: Block, run: _Run, target: Bytes, missing: Mask) -> None:
        first = max(block.start, run.offsets[0])
        end = min(block.start + block.elements, run.offsets[0] + run.sizes[0])
        if first < end:
            inside = slice(first - block.start, end - block.start)
            target[inside] = self._raw(run, first - run.offsets[0], end - first)
            missing[inside] = False

    def _fill_box(self, block: Block, run: _Run, target: Bytes, missing: Mask) -> None:
        pairs = list(zip(block.offsets, block.sizes, run.offsets, run.sizes, strict=True))
        low = [max(b, r) for b, _, r, _ in pairs]
        high = [min(b + n, r + m) for b, n, r, m in pairs]
        shape = tuple(end - first for first, end in zip(low, high, strict=True))
        if any(length <= 0 for length in shape):
            return
        inside = _slices(low, high, block.offsets)
        missing[inside] = False
        if run.strides is not None:
            target[inside] = self._turned(run)[_slices(low, high, run.offsets)]
            return
        first = 0
        for position, offset, length in zip(low, run.offsets, run.sizes, strict=True):
            first = first * length + position - offset
        raw = self._raw(run, first, math.prod(shape))
        target[inside] = raw.reshape(*shape, self.item)

    def _raw(self, run: _Run, first: int, count: int) -> Bytes:
        descriptor = os.open(run.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, count * self.item, run.start + first * self.item)
        finally:
            os.close(descriptor)
        if len(data) != count * self.item:
            raise UserError("the file ends in the middle of a tensor", where=str(run.path))
        return np.frombuffer(data, np.uint8).reshape(count, self.item)

    def _turned(self, run: _Run) -> Bytes:
        """A whole chunk that is stored with its dimensions in another order."""
        count = math.prod(run.sizes)
        if count * self.item > _MAX_TRANSPOSED_BYTES:
            raise UserError(
                f"stored transposed, over {_MAX_TRANSPOSED_BYTES >> 20} MiB", where=str(run.path)
            )
        strides = run.strides or ()
        order = sorted(range(len(run.sizes)), key=lambda axis: (-strides[axis], axis))
        stored = self._raw(run, 0, count).reshape(*(run.sizes[i] for i in order), self.item)
        back = [order.index(axis) for axis in range(len(order))]
        return stored.transpose(*back, len(order))


@dataclass(frozen=True)
class _Run:
    """Raw elements in a file: a box (or flat run) that begins at byte `start`."""

    path: Path
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None


def _slices(low: list[int], high: list[int], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """The box from `low` to `high` as seen from `origin`."""
    return tuple(
        slice(first - zero, end - zero) for first, end, zero in zip(low, high, origin, strict=True)
    )


def _check_box(chunk: Chunk, tensor: TensorMeta) -> None:
    shape = (math.prod(tensor.shape),) if tensor.flat else tensor.shape
    box = (chunk.offsets, chunk.sizes)
    if any(len(each) != len(shape) for each in box) or any(
        first + count > length for first, count, length in zip(*box, shape, strict=True)
    ):
        raise UserError(f"a chunk lies outside its tensor of shape {list(tensor.shape)}")


def _why_unreadable(tensor: TensorMeta, held: int) -> str:
    if tensor.dtype not in ITEM_SIZE_BYTES:
        return "its elements are not read in this format"
    if not tensor.chunks:
        return "stored as a strided view"
    return f"the files hold {held} of {math.prod(tensor.shape)} elements"


def digest(elements: Elements) -> str:
    """XXH3 (128 bits, hex) of the row-major bytes: equal for every layout of equal elements."""
    found = xxhash.xxh3_128()
    for block in blocks(elements.tensor.shape):
        found.update(np.ascontiguousarray(elements.block(block)).data)
    return found.hexdigest()
