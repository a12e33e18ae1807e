"""Damages a private copy of a checkpoint, so that a drill can ask who notices.

First a live victim is chosen, always the same one for the same checkpoint: a tensor that the
checkpoint lists, and the file that holds it. Damage to a file that nothing reads would prove
nothing. Then the file is hashed, changed in place, and hashed again; a damage has fired only when
the hashes differ. A bit flip hits the middle of the mantissa of a non-zero element: the value stays
plausible, so nothing but a checksum or the training itself can show it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from ckptdrill import formats, store
from ckptdrill.errors import UserError
from ckptdrill.formats.layout import ITEM_SIZE_BYTES, TensorMeta
from ckptdrill.model import Damage, DamageKind

# Bits of mantissa and of exponent, from the lowest bit of an element on.
_FLOAT_BITS = {
    "float64": (52, 11),
    "float32": (23, 8),
    "float16": (10, 5),
    "bfloat16": (7, 8),
    "float8_e4m3fn": (3, 4),
    "float8_e5m2": (2, 5),
}
# Four bits below the highest of the mantissa: a relative change of 2**-6 to 2**-5.
_BITS_BELOW_EXPONENT = 5
_NOT_A_WEIGHT = re.compile(
    r"optim|exp_avg|momentum|adam|moment\d|master|fp32_flat|rng|random"
    r"|(^|[._/:])(opt|ema|sched|scheduler|scaler|loader|state\.\d+)([._/:]|$)",
    re.IGNORECASE,
)
_SCAN_BYTES = 1 << 16


@dataclass(frozen=True)
class _Victim:
    """What is damaged: `path` is real and inside the copy, `file` its name in the checkpoint.

    `tensor` to `size_bytes` tell where the raw elements are; without a known format, where the
    file's are, `tensor` and `dtype` None.
    """

    path: Path
    file: str
    tensor: str | None
    dtype: str | None
    start_byte: int
    size_bytes: int


def apply(damage: Damage, checkpoint: Path) -> dict[str, Any]:
    """Carry out `damage` on the private copy at `checkpoint` and return its record.

    The record has `id`, `kind`, `format`, `file` (relative to the checkpoint), `tensor`,
    `element_offset` (elements before it in the stored order of its chunk), `byte_offset` (in the
    file), `bit` (in that byte, lowest first), `files` (sizes in bytes and SHA-256 before and after;
    None after a deletion) and `fired`: whether anything changed. Raises UserError when there is
    nothing to damage, `parameters["tensor"]` (a glob over keys) matches nothing, or the copy is not
    private.
    """
    form = formats.recognise(checkpoint)
    victim = _victim(checkpoint, damage.parameters.get("tensor"))
    before = _sealed(victim.path)
    place = _KINDS[damage.kind](victim)
    after = _sealed(victim.path)
    return {
        "id": damage.id,
        "kind": damage.kind.value,
        "format": form,
        "file": victim.file,
        "tensor": victim.tensor,
        "element_offset": None,
        "byte_offset": None,
        "bit": None,
        **place,
        "files": [
            {
                "path": victim.file,
                "size_bytes_before": before[0],
                "size_bytes_after": after[0],
                "sha256_before": before[1],
                "sha256_after": after[1],
            }
        ],
        "fired": before != after,
    }


def _sealed(path: Path) -> tuple[int, str] | tuple[None, None]:
    """Size in bytes and SHA-256, or Nones when there is no such file."""
    if not path.exists():
        return None, None
    return path.stat().st_size, store.sha256_of(path)


# --------------------------------------------------------------------------------------------------
# Choosing the victim


def _victim(checkpoint: Path, pattern: object) -> _Victim:
    try:
        listed = formats.tensors(checkpoint)
    except UserError:
        if pattern is not None:
            raise
        return _private(_largest_file(checkpoint))
    key = _choose(listed, None if pattern is None else str(pattern), checkpoint)
    return _private(_in_chunk(checkpoint, key, listed[key]))


def _choose(listed: Mapping[str, TensorMeta], pattern: str | None, checkpoint: Path) -> str:
    """The key of the largest fitting tensor, of equal ones the first by name."""
    stored = {key: t for key, t in listed.items() if t.size_bytes and t.chunks}
    if pattern is not None:
        named = [key for key in stored if fnmatchcase(key, pattern)]
        if not named:
            raise UserError(
                f"no stored tensor matches {pattern!r}",
                where=str(checkpoint),
                hint="the keys include: " + ", ".join(sorted(stored)[:5]),
            )
        candidates = named
    else:
        floats = [key for key, tensor in stored.items() if tensor.dtype in _FLOAT_BITS]
        weights = [key for key in floats if not _NOT_A_WEIGHT.search(key)]
        candidates = _stored_once(weights, stored, checkpoint) or weights or floats or list(stored)
    if not candidates:
        raise UserError("the checkpoint holds no tensor to damage", where=str(checkpoint))
    return min(candidates, key=lambda key: (-stored[key].size_bytes, key))


def _stored_once(keys: list[str], stored: Mapping[str, TensorMeta], checkpoint: Path) -> list[str]:
    """`keys` without tied weights: of two stored copies a load keeps one, and the damage may be in
    the other, where it changes nothing.
    """
    beginnings = {key: _beginning(stored[key], checkpoint) for key in keys}
    copies = Counter(beginnings.values())
    return [key for key, beginning in beginnings.items() if copies[beginning] == 1]


def _beginning(tensor: TensorMeta, checkpoint: Path) -> tuple[str, tuple[int, ...], bytes]:
    """What tells two stored tensors apart: dtype, shape, and their first bytes."""
    path, start, size = formats.payload(checkpoint, tensor.chunks[0])
    with path.open("rb") as stream:
        stream.seek(start)
        return tensor.dtype, tensor.shape, stream.read(min(size, 4096))


def _in_chunk(checkpoint: Path, key: str, tensor: TensorMeta) -> _Victim:
    """The largest chunk of a tensor, of equal ones the first."""
    chunk = max(tensor.chunks, key=lambda c: c.elements)
    path, start, size = formats.payload(checkpoint, chunk)
    if size != chunk.elements * ITEM_SIZE_BYTES[tensor.dtype]:
        raise UserError(f"the stored size of {key!r} does not fit its shape", where=str(path))
    return _Victim(path, chunk.file, key, tensor.dtype, start, size)


def _largest_file(checkpoint: Path) -> _Victim:
    files = list(store.tree_files(checkpoint))
    if not files:
        raise UserError("nothing to damage: no file here", where=str(checkpoint))
    path = min(files, key=lambda file: (-file.stat().st_size, file.as_posix()))
    name = path.name if path == checkpoint else path.relative_to(checkpoint).as_posix()
    return _Victim(path, name, None, None, 0, path.stat().st_size)


def _private(victim: _Victim) -> _Victim:
    """The victim, once sure that a write to it reaches no other name of the same file."""
    if victim.path.stat().st_nlink > 1:
        raise UserError(
            f"{victim.file} has other names (hard links): damaging it could reach the original",
            where=str(victim.path),
            hint="damage a private copy only",
        )
    return victim


# --------------------------------------------------------------------------------------------------
# The kinds: each changes the file and says where


def _flip_bit(victim: _Victim) -> dict[str, int | None]:
    """Flip one bit of the element nearest after the middle that is a normal number."""
    if victim.size_bytes == 0:
        return {}
    item = ITEM_SIZE_BYTES[victim.dtype] if victim.dtype else 1
    bit = _bit_of_element(victim.dtype)
    with victim.path.open("r+b") as stream:
        element = _element(stream, victim, item)
        byte_offset = victim.start_byte + element * item + bit // 8
        stream.seek(byte_offset)
        old = stream.read(1)[0]
        stream.seek(byte_offset)
        stream.write(bytes([old ^ 1 << bit % 8]))
    offset = element if victim.tensor is not None else None
    return {"element_offset": offset, "byte_offset": byte_offset, "bit": bit % 8}


def _bit_of_element(dtype: str | None) -> int:
    """Mid-mantissa for a float, the smallest change for anything else."""
    mantissa_bits, _ = _FLOAT_BITS.get(dtype or "", (0, 0))
    return max(mantissa_bits - _BITS_BELOW_EXPONENT, 0)


def _element(stream: BinaryIO, victim: _Victim, item: int) -> int:
    """The first normal element from the middle on, then from the start; else the middle one."""
    count = victim.size_bytes // item
    middle = count // 2
    if victim.dtype in _FLOAT_BITS:
        for first, end in ((middle, count), (0, middle)):
            found = _first_normal(stream, victim, first, end)
            if found is not None:
                return found
    return middle


def _first_normal(stream: BinaryIO, victim: _Victim, first: int, end: int) -> int | None:
    item = ITEM_SIZE_BYTES[victim.dtype or ""]
    for block_start in range(first, end, _SCAN_BYTES):
        stream.seek(victim.start_byte + block_start * item)
        block = stream.read(min(_SCAN_BYTES, end - block_start) * item)
        if block.count(0) == len(block):
            continue
        for position in range(0, len(block), item):
            if _normal(block[position : position + item], victim.dtype or ""):
                return block_start + position // item
    return None


def _normal(element: bytes, dtype: str) -> bool:
    """Neither zero nor subnormal, infinite or NaN: its exponent is neither all zeros nor ones."""
    mantissa_bits, exponent_bits = _FLOAT_BITS[dtype]
    ones = (1 << exponent_bits) - 1
    return int.from_bytes(element, "little") >> mantissa_bits & ones not in (0, ones)


def _truncate(victim: _Victim) -> dict[str, int | None]:
    """Cut the file to half, as a writer killed in the middle leaves it."""
    half = victim.path.stat().st_size // 2
    with victim.path.open("r+b") as stream:
        stream.truncate(half)
    return {"byte_offset": half}


def _delete(victim: _Victim) -> dict[str, int | None]:
    """Remove the file."""
    victim.path.unlink()
    return {}


_KINDS: Mapping[DamageKind, Callable[[_Victim], dict[str, int | None]]] = {
    DamageKind.BIT_FLIP: _flip_bit,
    DamageKind.TRUNCATE: _truncate,
    DamageKind.DELETE: _delete,
}
