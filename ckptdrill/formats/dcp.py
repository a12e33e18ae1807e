"""Reads torch.distributed.checkpoint folders: which tensors, and in which bytes of which file.

First `.metadata`, a pickle, is read without executing it. It says the shape and type of each
tensor and, for each chunk, a range of a `.distcp` file. Every file it names is held inside the
folder before anything is opened. `payload` then looks into the zip at that range for the raw
elements.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.formats import archive, pickles
from ckptdrill.formats.layout import ITEM_SIZE_BYTES, Chunk, TensorMeta

METADATA_NAME = ".metadata"
Range = tuple[str, int, int]
# One part of a metadata pickle can be referred to from many places: counts bound the reading.
_MAX_ENTRIES = 50_000
_MAX_FILES = 10_000
_MAX_FIELDS = 64


@dataclass(frozen=True)
class DcpCheckpoint:
    """The inventory of a DCP folder.

    `tensors` and `blobs` go by fully qualified name; a blob (any other value) is (file, offset in
    bytes, length in bytes). `files` are the files that hold them, relative and sorted. `notes` are
    what the metadata says about its writer.
    """

    tensors: Mapping[str, TensorMeta]
    blobs: Mapping[str, Range]
    files: tuple[str, ...]
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Stored:
    """Where things are: chunks by `_chunk_key`, blobs by name. `listed` chunks have a tensor."""

    chunks: dict[str, Range] = field(default_factory=dict)
    blobs: dict[str, Range] = field(default_factory=dict)
    listed: int = 0


def read(folder: Path) -> DcpCheckpoint:
    """The inventory of the DCP checkpoint in `folder`. Only `.metadata` is opened.

    Raises UserError when it is missing, damaged, hostile, or names a file outside the folder.
    """
    path = folder / METADATA_NAME
    content = pickles.load(_content(path), str(path))
    try:
        return _checkpoint(folder, _fields(content, "Metadata"))
    except pickles.Refused as refusal:
        raise pickles.Refused(refusal.what, where=str(path), hint=refusal.hint) from None


def payload(folder: Path, chunk: Chunk) -> tuple[Path, int, int]:
    """(file, first byte, size in bytes) of the raw elements of a chunk, little-endian, row-major
    unless the tensor was saved with other strides.

    Raises UserError when the file is missing or the chunk is not one stored tensor.
    """
    path = inside(folder, chunk.file)
    found = [
        member
        for member in archive.members(path, chunk.offset_bytes, chunk.length_bytes)
        if PurePosixPath(member.name).parent.name == "data"
    ]
    if len(found) != 1:
        raise UserError(f"{len(found)} storages where one is expected", where=str(path))
    return path, found[0].start_byte, found[0].size_bytes


def inside(folder: Path, relative: str) -> Path:
    """The real path of `relative` in `folder`.

    Raises UserError when it is absolute, holds `..`, or a link leads out of the folder.
    """
    parts = PurePosixPath(relative).parts
    try:
        root = folder.resolve()
        path = (root / relative).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"not a path: {relative[:200]!r}", where=str(folder)) from error
    if not parts or parts[0] == "/" or ".." in parts or not path.is_relative_to(root):
        raise UserError(
            f"the checkpoint names a file outside its folder: {relative[:200]!r}",
            where=str(folder),
            hint="treat the checkpoint as hostile, or copy it as a whole without links",
        )
    return path


def _content(path: Path) -> bytes:
    if path.is_symlink():
        inside(path.parent, path.name)
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise OSError(errno.EINVAL, "not a regular file")
        with path.open("rb") as stream:
            return stream.read(pickles.MAX_SIZE_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"no readable {METADATA_NAME}: {error.strerror}",
            where=str(path.parent),
            hint="without it a DCP checkpoint was never committed, and nothing can load it",
        ) from error


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The attributes of a dataclass instance of DCP's."""
    if not pickles.is_made(value, name):
        raise pickles.Refused(f"not DCP metadata: {name} was expected")
    return pickles.texts(value.state, _MAX_FIELDS)


def _checkpoint(folder: Path, fields: Mapping[str, Any]) -> DcpCheckpoint:
    stored = _stored(fields.get("storage_data"))
    named = pickles.texts(fields.get("state_dict_metadata"), _MAX_ENTRIES)
    tensors = {
        name: _tensor(name, _fields(entry, "TensorStorageMetadata"), stored)
        for name, entry in named.items()
        if not pickles.is_made(entry, "BytesStorageMetadata")
    }
    files = sorted({file for file, *_ in (*stored.chunks.values(), *stored.blobs.values())})
    if len(files) > _MAX_FILES:
        raise pickles.Refused(f"the metadata names over {_MAX_FILES} files")
    for file in files:
        inside(folder, file)
    _refuse_overlaps([*stored.chunks.values(), *stored.blobs.values()])
    version = fields.get("version")
    notes = {"metadata version": version[:64]} if isinstance(version, str) else {}
    return DcpCheckpoint(tensors, stored.blobs, tuple(files), notes)


def _refuse_overlaps(ranges: list[Range]) -> None:
    """One range may be named often, but ranges that share bytes claim more than the files hold."""
    previous: Range = ("", 0, 0)
    for file, start, length in sorted(set(ranges)):
        if file == previous[0] and start < previous[1] + previous[2] and length and previous[2]:
            raise pickles.Refused(f"the metadata names overlapping ranges of {file[:200]!r}")
        previous = (file, start, length)


def _stored(storage_data: Any) -> _Stored:
    if not isinstance(storage_data, pickles.Pairs) or len(storage_data) > _MAX_ENTRIES:
        raise pickles.Refused(f"not a file system's storage of at most {_MAX_ENTRIES} entries")
    stored = _Stored()
    for key, value in storage_data:
        index = _fields(key, "MetadataIndex")
        name, offset = _text(index.get("fqn")), index.get("offset")
        if offset is None:
            stored.blobs[name] = _range(value)
        else:
            stored.chunks[_chunk_key(name, pickles.sizes(offset))] = _range(value)
    return stored


def _range(value: Any) -> Range:
    info = _fields(value, "_StorageInfo")
    if info.get("transform_descriptors"):
        raise pickles.Refused("the checkpoint is compressed or encrypted, which is not supported")
    start, length = pickles.count(info.get("offset")), pickles.count(info.get("length"))
    return _text(info.get("relative_path")), start, length


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise pickles.Refused("not DCP metadata: a text was expected")
    return value


def _chunk_key(name: str, offsets: tuple[int, ...]) -> str:
    # A text: unlike that of a tuple, its hash cannot be made to collide from outside.
    return f"{offsets}{name}"


def _tensor(name: str, fields: Mapping[str, Any], stored: _Stored) -> TensorMeta:
    chunks = fields.get("chunks")
    if not isinstance(chunks, list) or len(chunks) > len(stored.chunks) - stored.listed:
        raise pickles.Refused("not DCP metadata: not as many chunks as are stored")
    stored.listed += len(chunks)
    return TensorMeta(
        dtype=_dtype(fields.get("properties")),
        shape=pickles.sizes(fields.get("size")),
        chunks=tuple(_chunk(name, _fields(c, "ChunkStorageMetadata"), stored) for c in chunks),
    )


def _dtype(properties: Any) -> str:
    """From `TensorProperties`, whose state is a tuple that begins with the dtype."""
    state = properties.state if pickles.is_made(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, pickles.Symbol) or dtype.name not in ITEM_SIZE_BYTES:
        raise pickles.Refused("not DCP metadata: a dtype was expected")
    return dtype.name


def _chunk(name: str, fields: Mapping[str, Any], stored: _Stored) -> Chunk:
    offsets = pickles.sizes(fields.get("offsets"))
    where = stored.chunks.get(_chunk_key(name, offsets))
    if where is None:
        raise pickles.Refused(f"no file holds {name[:200]!r} at {offsets}")
    return Chunk(offsets, pickles.sizes(fields.get("sizes")), *where, zipped=True)
