"""Reads files of torch.save: which tensors, under which keys, in which bytes.

First the zip's directory (`legacy` stands in for files that are no zip), then `data.pkl` without
executing it, then a walk over the containers in it: each tensor found gets a dotted key
(`model.layer.weight`, `optimizer.state.0.exp_avg`) and the bytes of its storage. A DTensor stands
for the local tensor that this file holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.formats import archive, legacy, pickles
from ckptdrill.formats.layout import ITEM_SIZE_BYTES, STORAGE_DTYPE, Chunk, TensorMeta

LEGACY_MAGIC = legacy.MAGIC
# One container can be referred to from many places, also from itself: these end the walk.
_MAX_DEPTH = 64
_MAX_KEY_LENGTH = 512
_MAX_TENSORS = 30_000
_MAX_VISITS = 300_000
_NOTES: tuple[str, ...] = ("version", "byteorder")
_MAX_NOTE_BYTES = 64


@dataclass(frozen=True)
class _Storages:
    """The storages of one file by their key in the archive."""

    file: str
    members: Mapping[str, archive.Member]


@dataclass(frozen=True)
class Saved:
    """What one file of torch.save holds: `content` as `pickles.load` gives it, and its tensors by
    dotted key. `notes` are what the file says about itself.
    """

    content: Any
    tensors: Mapping[str, TensorMeta]
    notes: Mapping[str, str]


def read(path: Path) -> dict[str, TensorMeta]:
    """Every tensor in a file of torch.save by dotted key; chunk files are `path.name`.

    Shapes are those of the stored tensor, for a DTensor of its local part. Raises UserError for a
    damaged file, or one that asks for a global off the allow-list.
    """
    return dict(load(path).tensors)


def load(path: Path, offset_bytes: int = 0, length_bytes: int | None = None) -> Saved:
    """All of a file of torch.save but the elements of its tensors; or of the one that a DCP shard
    holds at that range.

    Raises UserError as `read` does.
    """
    if offset_bytes == 0 and length_bytes is None and _head(path) == LEGACY_MAGIC:
        content, storages, notes = legacy.load(path)
    else:
        content, storages, notes = _zipped(path, offset_bytes, length_bytes)
    held = _Storages(path.name, storages)
    try:
        found = {key: _tensor(value, held) for key, value in _Walk().below(content)}
    except pickles.Refused as refusal:
        raise pickles.Refused(refusal.what, where=str(path), hint=refusal.hint) from None
    return Saved(content, found, notes)


def _zipped(
    path: Path, offset_bytes: int, length_bytes: int | None
) -> tuple[Any, dict[str, archive.Member], dict[str, str]]:
    found = archive.members(path, offset_bytes, length_bytes)
    members = {_inner(member.name): member for member in found}
    if "data.pkl" not in members:
        raise UserError("a zip archive, but not of torch.save", where=str(path))
    pickled = archive.read_member(path, members["data.pkl"], pickles.MAX_SIZE_BYTES)
    notes: dict[str, str] = {
        name: archive.read_member(path, members[name], _MAX_NOTE_BYTES).decode("ascii", "replace")
        for name in _NOTES
        if name in members
    }
    if notes.get("byteorder", "little") != "little":
        raise UserError("saved on a big-endian machine, which is not supported", where=str(path))
    storages = {
        name.removeprefix("data/"): member
        for name, member in members.items()
        if name.startswith("data/")
    }
    return pickles.load(pickled, str(path)), storages, notes


def is_torch_save(head: bytes) -> bool:
    """Whether a file that begins with `head` (256 bytes) is of torch.save, legacy or not.

    A DCP shard looks the same from its head; its name tells them apart.
    """
    zipped = head.startswith(b"PK\x03\x04") and b"data.pkl" in head[30:]
    return zipped or head.startswith(LEGACY_MAGIC)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(len(LEGACY_MAGIC))
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=str(path)) from error


def _inner(name: str) -> str:
    """The name without the archive's own folder: `archive/data/0` is `data/0`."""
    return str(PurePosixPath(*PurePosixPath(name).parts[1:]))


class _Walk:
    """Goes through the containers of one file, depth first, and counts what it passes."""

    def __init__(self) -> None:
        self.visits = 0
        self.tensors = 0
        self.inside: set[int] = set()

    def below(
        self, value: Any, key: str = "", depth: int = 0
    ) -> Iterator[tuple[str, pickles.Made]]:
        """(dotted key, rebuild call) of every tensor, in file order.

        Raises Refused when the containers hold each other without end.
        """
        self.visits += 1
        tensor = as_tensor(value)
        self.tensors += tensor is not None
        if depth > _MAX_DEPTH or self.visits > _MAX_VISITS or self.tensors > _MAX_TENSORS:
            raise pickles.Refused("the containers in the file hold more than any checkpoint does")
        if tensor is not None:
            yield key, tensor
            return
        if id(value) in self.inside:
            raise pickles.Refused("a container in the file holds itself: more than any checkpoint")
        self.inside.add(id(value))
        for name, item in children(value):
            self.visits += 1
            if isinstance(item, (list, tuple, pickles.Made)):
                yield from self.below(item, joined(key, name), depth + 1)
        self.inside.discard(id(value))


def joined(key: str, name: Any) -> str:
    """The dotted key of an entry; whatever is not a text or a small number gets a `?`.

    Raises Refused when it is longer than that of any checkpoint.
    """
    if isinstance(name, int) and abs(name) < 1 << 63:
        name = str(name)
    if not isinstance(name, str):
        name = "?"
    if len(key) + len(name) > _MAX_KEY_LENGTH:
        raise pickles.Refused(f"a key of over {_MAX_KEY_LENGTH} characters")
    return f"{key}.{name}" if key else name


def children(value: Any) -> Iterable[tuple[Any, Any]]:
    """(name, item) of what a container holds; nothing for anything else."""
    if isinstance(value, pickles.Pairs):
        return value
    if pickles.is_made(value, "OrderedDict", "defaultdict", "Counter"):
        return value.items if isinstance(value.items, pickles.Pairs) else ()
    if pickles.is_made(value, "Namespace") and isinstance(value.state, pickles.Pairs):
        return value.state
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return ()


def as_tensor(value: Any) -> pickles.Made | None:
    """The `_rebuild_tensor` call behind a tensor, a parameter or a DTensor; None for the rest."""
    for _ in range(4):  # a parameter of a DTensor is three calls deep
        if not isinstance(value, pickles.Made):
            return None
        if value.what.name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return value
        if value.what.name.startswith("_rebuild_parameter") and value.args:
            value = value.args[0]
        elif value.what.name == "_rebuild_from_type_v2" and len(value.args) == 4:
            value = _behind_type(value.args)
        else:
            return None
    return None


def _behind_type(args: tuple[Any, ...]) -> Any:
    """Out of (function, type, args, state): the local part of a DTensor, or the plain call."""
    function, _, inner, state = args
    for attributes in state if isinstance(state, tuple) else (state,):  # (of __dict__, of slots)
        if isinstance(attributes, pickles.Pairs):
            local = pickles.texts(attributes, 64).get("_local_tensor")
            if local is not None:
                return local
    if isinstance(function, pickles.Symbol) and isinstance(inner, tuple):
        return pickles.Made(function, inner)
    return None


def _tensor(made: pickles.Made, storages: _Storages) -> TensorMeta:
    if len(made.args) < 6:
        raise pickles.Refused("a damaged pickle: a tensor was expected")
    storage, offset, size, stride = made.args[:4]
    key, dtype = _storage(storage)
    if made.what.name == "_rebuild_tensor_v3":
        dtype = _dtype(made.args[6:7])
    shape, strides = pickles.sizes(size), pickles.sizes(stride)
    if not _dense(shape, strides):
        return TensorMeta(dtype, shape, ())
    chunks = _chunks(storages, key, dtype, shape, pickles.count(offset))
    return TensorMeta(dtype, shape, chunks, None if _row_major(shape, strides) else strides)


def _storage(reference: Any) -> tuple[str, str]:
    """(key in the archive, dtype) of a persistent reference to a storage."""
    parts = reference.identifier if isinstance(reference, pickles.Persistent) else ()
    if isinstance(parts, tuple) and len(parts) >= 5:
        _, kind, key, *_ = parts
        if isinstance(kind, pickles.Symbol) and kind.name in STORAGE_DTYPE and type(key) is str:
            return key, STORAGE_DTYPE[kind.name]
    raise pickles.Refused("a damaged pickle: a storage was expected")


def _dtype(found: tuple[Any, ...]) -> str:
    for dtype in found:
        if isinstance(dtype, pickles.Symbol) and dtype.name in ITEM_SIZE_BYTES:
            return dtype.name
    raise pickles.Refused("a damaged pickle: a dtype was expected")


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill one run of bytes, in whatever order of dimensions."""
    if len(shape) != len(stride):
        raise pickles.Refused("a damaged pickle: strides that do not fit the shape")
    expected = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1 and step != expected:
            return False
        expected *= length
    return True


def _row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, length in zip(reversed(stride), reversed(shape), strict=True):
        if length > 1 and step != expected:
            return False
        expected *= length
    return True


def _chunks(
    storages: _Storages, key: str, dtype: str, shape: tuple[int, ...], offset: int
) -> tuple[Chunk, ...]:
    member = storages.members.get(key)
    item = ITEM_SIZE_BYTES[dtype]
    start, size = offset * item, math.prod(shape) * item
    if member is None or start + size > member.size_bytes:
        raise pickles.Refused(f"the storage {key[:200]!r} is missing or too small")
    return (Chunk((0,) * len(shape), shape, storages.file, member.start_byte + start, size),)
