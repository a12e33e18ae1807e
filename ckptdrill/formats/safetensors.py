"""Reads safetensors files: a length, a JSON header of that length, then the raw elements.

The format is documented at https://huggingface.co/docs/safetensors: eight bytes (little-endian)
give the size of the header, at most 100 MB; the header maps each name to dtype, shape and a range
of the bytes after it. Here the whole of it is checked before any of it is believed: sizes against
shapes, ranges against the file and against each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.formats import listing
from ckptdrill.formats.layout import ITEM_SIZE_BYTES, Chunk, TensorMeta

# Headers of real models have some 100 bytes per tensor.
MAX_HEADER_BYTES = 8 << 20
_MAX_TENSORS = 50_000
# What the documentation allows: a longer "length" is no safetensors file at all.
MAX_WRITTEN_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 16
_MAX_KEY_LENGTH = 512
DTYPES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class SafetensorsFile:
    """The tensors of a file by name, and the texts that the writer put beside them."""

    tensors: Mapping[str, TensorMeta]
    notes: Mapping[str, str]


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins with `head` (at least 9 bytes) looks like safetensors."""
    length = int.from_bytes(head[:8], "little")
    return 2 <= length <= MAX_WRITTEN_HEADER_BYTES and head[8:10] in (b'{"', b"{}")


def read(path: Path) -> SafetensorsFile:
    """The inventory of a safetensors file; chunk files are `path.name`. Only the header is read.

    Raises UserError when the header lies about anything: its length, a dtype, a shape, a range, or
    leaves bytes of the file that no tensor claims.
    """
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=str(path)) from error
    length = int.from_bytes(listing.head(path, 8), "little")
    if length > min(size_bytes - 8, MAX_HEADER_BYTES):
        raise _refused(path, f"a header of {length} bytes in a file of {size_bytes}")
    try:
        text = listing.head(path, 8 + length)[8:].decode()
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"a header that is no JSON ({str(error)[:80]})") from error
    if not isinstance(header, dict) or len(header) > _MAX_TENSORS:
        raise _refused(path, f"a header that is no mapping of at most {_MAX_TENSORS} tensors")
    notes = header.pop("__metadata__", None) or {}
    try:
        found = {
            _name(name): _tensor(entry, path.name, 8 + length) for name, entry in header.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"a header with a damaged entry ({str(error)[:80]})") from error
    _check_ranges(path, found, 8 + length, size_bytes)
    return SafetensorsFile(found, _texts(notes))


def _refused(path: Path, what: str) -> UserError:
    return UserError(
        f"not a whole safetensors file: {what}",
        where=str(path),
        hint="it was cut short or damaged: restore it from another copy",
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _name(name: str) -> str:
    if len(name) > _MAX_KEY_LENGTH:
        raise ValueError(f"a name of over {_MAX_KEY_LENGTH} characters")
    return name


def _texts(notes: Any) -> dict[str, str]:
    pairs = notes.items() if isinstance(notes, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _tensor(entry: Mapping[str, Any], file: str, data_start: int) -> TensorMeta:
    dtype = DTYPES[entry["dtype"]]
    shape = tuple(_count(length) for length in entry["shape"])
    first, end = (_count(offset) for offset in entry["data_offsets"])
    if len(shape) > _MAX_DIMENSIONS or end - first != math.prod(shape) * ITEM_SIZE_BYTES[dtype]:
        raise ValueError(f"{end - first} bytes for {dtype} of shape {shape[:_MAX_DIMENSIONS]}")
    chunk = Chunk((0,) * len(shape), shape, file, data_start + first, end - first)
    return TensorMeta(dtype, shape, (chunk,))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a size was expected")
    return value


def _check_ranges(
    path: Path, found: Mapping[str, TensorMeta], data_start: int, size_bytes: int
) -> None:
    """The ranges must follow each other without holes up to the end of the file."""
    position = data_start
    for chunk in sorted(
        (chunk for tensor in found.values() for chunk in tensor.chunks),
        key=lambda chunk: (chunk.offset_bytes, chunk.length_bytes),
    ):
        if chunk.offset_bytes != position:
            raise _refused(path, f"ranges that overlap or leave a hole at byte {position}")
        position += chunk.length_bytes
    if position != size_bytes:
        raise _refused(path, f"{position} bytes by its header, {size_bytes} on disk")
