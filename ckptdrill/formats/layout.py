"""What every format says about its tensors: their type, their shape, and where their bytes are.

Nouns only. A format reader fills them in; damage and inventories read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

# Bytes per element of every torch dtype that a checkpoint may hold.
ITEM_SIZE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "qint32": 4,
    "qint8": 1,
    "quint8": 1,
    "quint4x2": 1,
    "quint2x4": 1,
}

# The element type of the typed storages that torch.save names; UntypedStorage holds bytes.
STORAGE_DTYPE: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "QInt32Storage": "qint32",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where it is stored. `file` is relative to the checkpoint.

    `offset_bytes` and `length_bytes` delimit what the format stores for it: in torch.save files the
    raw elements; in DCP (then `zipped`) a zip that holds them, `dcp.payload` gives the raw range.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset_bytes: int
    length_bytes: int
    zipped: bool = False

    @property
    def elements(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class TensorMeta:
    """A stored tensor. `dtype` is torch's name without the `torch.`, or `unknown`; `shape` is the
    global one.

    `chunks` is empty when the elements are not one run of bytes (a strided view). `strides` (in
    elements) are there only when the one chunk is not in row-major order. When `flat`, a chunk is a
    run of the flattened tensor: its `offsets` and `sizes` are a first element and a count.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    strides: tuple[int, ...] | None = None
    flat: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements, as the shape says; 0 when the type is not known."""
        return math.prod(self.shape) * ITEM_SIZE_BYTES.get(self.dtype, 0)


class Role(StrEnum):
    """What a file is for, when the checkpoint is read again."""

    DATA = "data"  # holds tensors or other state
    METADATA = "metadata"  # says what the data files hold, or where
    MARKER = "marker"  # its presence says that the checkpoint is whole
    POINTER = "pointer"  # names the checkpoint to read
    OTHER = "other"


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint. `path` is relative to it (its name for a file).

    `rank` is the rank that wrote it, where its name says so: files of equal `path` but for that
    number hold the shards of different ranks.
    """

    path: str
    role: Role
    rank: int | None = None
