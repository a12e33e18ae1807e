"""Damages a private copy of a checkpoint, so that a drill can ask who notices.

First a live victim is chosen, always the same one for the same checkpoint: a tensor that the
checkpoint lists, and the file that holds it. Damage to a file that nothing reads would prove
nothing. Then the file is hashed, changed in place, and hashed again; a damage has fired only when
the hashes differ. A bit flip hits the middle of the mantissa of a non-zero element: the value stays
plausible, so nothing but a checksum or the training itself can show it. A header flip hits what a
reader follows to find that element: where it succeeds, every element after it is another one.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from ckptdrill import formats, store
from ckptdrill.errors import UserError
from ckptdrill.formats import dcp
from ckptdrill.formats.layout import ITEM_SIZE_BYTES, Role, TensorMeta
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
_DIGITS = re.compile(r"\d+")
_SCAN_BYTES = 1 << 16
# What a lost page of a page cache or a hole in a sparse file leaves: a block of zeros.
_ZEROED_BYTES = 4096
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, length of the name, of the extra field
_EXTRA_LENGTH_BYTE = 28  # in the local header of a zip member
_LARGEST_HEADER_BYTES = 1 << 26  # of a safetensors file; the format allows 100 MB


_Seal = tuple[int, str] | tuple[None, None]


@dataclass(frozen=True)
class _Victim:
    """What is damaged: `path` is real and inside the copy, `file` its name in the checkpoint.

    `tensor` to `size_bytes` tell where the raw elements are; without a known format, where the
    file's are, `tensor` and `dtype` None. `other` is the file it is exchanged with or replaced by.
    """

    path: Path
    file: str
    tensor: str | None
    dtype: str | None
    start_byte: int
    size_bytes: int
    other: Path | None = None


def apply(damage: Damage, checkpoint: Path, foreign: Path | None = None) -> dict[str, Any]:
    """Carry out `damage` on the private copy at `checkpoint` and return its record.

    `foreign` is the checkpoint of another step, which a foreign shard is taken from; it is only
    read. The record has `id`, `kind`, `format`, `file` (relative to the checkpoint), `other` (the
    second file of a swap), `tensor`, `element_offset` (elements before it in the stored order of
    its chunk), `byte_offset` (in the file), `bit` (in that byte, lowest first), `files` (sizes in
    bytes and SHA-256 before and after; None after a deletion) and `fired`: whether anything
    changed. Raises UserError when there is nothing to damage, `parameters["tensor"]` (a glob over
    keys) or `parameters["file"]` (a glob over files) matches nothing, or the copy is not private.
    """
    form = formats.recognise(checkpoint)
    victim = _victim(checkpoint, damage.parameters)
    touched = {victim.file: victim.path}
    if damage.kind is DamageKind.SWAP:
        other = _partner(checkpoint, victim)
        touched[_name(checkpoint, other)] = other
        victim = replace(victim, other=other)
    elif damage.kind is DamageKind.FOREIGN_SHARD:
        victim = replace(victim, other=_foreign(checkpoint, victim, foreign))
    before = {name: _sealed(path) for name, path in touched.items()}
    place = _KINDS[damage.kind](victim)
    after = {name: _sealed(path) for name, path in touched.items()}
    return {
        "id": damage.id,
        "kind": damage.kind.value,
        "format": form,
        "file": victim.file,
        "other": next((name for name in touched if name != victim.file), None),
        "tensor": victim.tensor,
        "element_offset": None,
        "byte_offset": None,
        "bit": None,
        **place,
        "files": [_changed(name, before[name], after[name]) for name in touched],
        "fired": before != after,
    }


def tear(damage: Damage, checkpoint: Path) -> dict[str, Any]:
    """Leave the private copy at `checkpoint` as a writer that died before its commit leaves it.

    Without the file that a format writes last; where there is no such file, the largest is cut to
    half. Returns a record as `apply` does.
    """
    commits = [f.path for f in formats.files(checkpoint) if f.role in {Role.MARKER, Role.METADATA}]
    kind, file = DamageKind.TRUNCATE, "*"
    if checkpoint.is_dir() and commits:
        kind, file = DamageKind.DELETE, min(commits, key=lambda path: (path.count("/"), path))
    return apply(replace(damage, kind=kind, parameters={"file": file}), checkpoint)


def _changed(name: str, before: _Seal, after: _Seal) -> dict[str, Any]:
    return {
        "path": name,
        "size_bytes_before": before[0],
        "size_bytes_after": after[0],
        "sha256_before": before[1],
        "sha256_after": after[1],
    }


def _sealed(path: Path) -> _Seal:
    """Size in bytes and SHA-256, or Nones when there is no such file."""
    if not path.exists():
        return None, None
    return path.stat().st_size, store.sha256_of(path)


# --------------------------------------------------------------------------------------------------
# Choosing the victim


def _victim(checkpoint: Path, parameters: Mapping[str, Any]) -> _Victim:
    pattern, file = parameters.get("tensor"), parameters.get("file")
    if file is not None:
        if pattern is not None:
            raise UserError("a damage hits a tensor or a file: give one of the two")
        return _private(_largest_file(checkpoint, str(file)))
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


def _largest_file(checkpoint: Path, pattern: str | None = None) -> _Victim:
    """The largest file, or the largest of those whose name in the checkpoint fits `pattern`."""
    files = {_name(checkpoint, path): path for path in store.tree_files(checkpoint)}
    if not files:
        raise UserError("nothing to damage: no file here", where=str(checkpoint))
    named = [name for name in files if pattern is None or fnmatchcase(name, pattern)]
    if not named:
        raise UserError(
            f"no file of the checkpoint matches {pattern!r}",
            where=str(checkpoint),
            hint="the files include: " + ", ".join(sorted(files)[:5]),
        )
    name = min(named, key=lambda name: (-files[name].stat().st_size, name))
    return _Victim(files[name], name, None, None, 0, files[name].stat().st_size)


def _name(checkpoint: Path, path: Path) -> str:
    return path.name if path == checkpoint else path.relative_to(checkpoint).as_posix()


def _private(victim: _Victim) -> _Victim:
    """The victim, once sure that a write to it reaches no other name of the same file."""
    _refuse_links(victim.path)
    return victim


def _refuse_links(path: Path) -> None:
    if path.stat().st_nlink > 1:
        raise UserError(
            f"{path.name} has other names (hard links): damaging it could reach the original",
            where=str(path),
            hint="damage a private copy only",
        )


def _partner(checkpoint: Path, victim: _Victim) -> Path:
    """The shard that stands for another rank: named as the victim but for the numbers.

    Of several one that another rank wrote, nearest in size: a reader is least likely to refuse it.
    """
    size, form = victim.path.stat().st_size, _DIGITS.sub("#", victim.file)
    files = formats.files(checkpoint)
    own = next((file.rank for file in files if file.path == victim.file), None)
    others = [
        (file.rank == own, abs((checkpoint / file.path).stat().st_size - size), file.path)
        for file in files
        if file.path != victim.file and _DIGITS.sub("#", file.path) == form
    ]
    if not others:
        raise UserError(
            f"{victim.file} is the only shard of its kind: there is none to swap it with",
            where=str(checkpoint),
            hint="swap needs a source of two ranks or more that each write a file",
        )
    other = checkpoint / min(others)[-1]
    _refuse_links(other)
    return other


def _foreign(checkpoint: Path, victim: _Victim, foreign: Path | None) -> Path:
    """The file of the other step that has the victim's place."""
    if foreign is None:
        raise UserError("a foreign shard needs another saved step", where=str(checkpoint))
    path = foreign if victim.path == checkpoint else dcp.inside(foreign, victim.file)
    if not path.is_file():
        raise UserError(f"the other step has no {victim.file}", where=str(foreign))
    return path


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
        _flip(stream, byte_offset, bit % 8)
    offset = element if victim.tensor is not None else None
    return {"element_offset": offset, "byte_offset": byte_offset, "bit": bit % 8}


def _flip(stream: BinaryIO, byte_offset: int, bit: int) -> None:
    stream.seek(byte_offset)
    old = stream.read(1)[0]
    stream.seek(byte_offset)
    stream.write(bytes([old ^ 1 << bit]))


def _flip_header(victim: _Victim) -> dict[str, int | None]:
    """Flip the lowest bit of a byte that a reader follows to the victim's elements.

    In a zip, the length of the extra field before them: they seem to begin one byte off. In
    safetensors, the last letter of the tensor's name. In anything else the first byte.
    """
    if victim.path.stat().st_size == 0:
        return {}
    with victim.path.open("r+b") as stream:
        byte_offset = _zip_header(stream, victim) or _safetensors_header(stream, victim) or 0
        _flip(stream, byte_offset, 0)
    return {"byte_offset": byte_offset, "bit": 0}


def _zip_header(stream: BinaryIO, victim: _Victim) -> int | None:
    """Where the length of the extra field stands, if the elements are a stored zip member."""
    first = max(victim.start_byte - _SCAN_BYTES, 0)
    stream.seek(first)
    before = stream.read(victim.start_byte - first)
    local = before.rfind(b"PK\x03\x04")
    if local < 0 or len(before) - local < _LOCAL_HEADER.size:
        return None
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(before, local)
    if local + _LOCAL_HEADER.size + name_bytes + extra_bytes != len(before):
        return None
    return first + local + _EXTRA_LENGTH_BYTE


def _safetensors_header(stream: BinaryIO, victim: _Victim) -> int | None:
    """Where the last letter of the tensor's name stands, of the first tensor without one known."""
    stream.seek(0)
    start = stream.read(8)
    size_bytes = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= size_bytes <= _LARGEST_HEADER_BYTES:
        return None
    header = stream.read(size_bytes)
    try:
        names = [name for name in json.loads(header) if name != "__metadata__"]
    except (ValueError, RecursionError):
        return None
    known = next((n for n in names if (victim.tensor or "").endswith(n)), None)
    name = known or next(iter(names), "")
    found = header.find(f'"{name}"'.encode())
    return 8 + found + len(name.encode()) if name and found >= 0 else None


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


def _zero(victim: _Victim) -> dict[str, int | None]:
    """Zero a block of the tensor that begins with a normal number; a file without one, whole."""
    with victim.path.open("r+b") as stream:
        offset_bytes, size_bytes = 0, victim.size_bytes
        if victim.dtype is not None:
            item = ITEM_SIZE_BYTES[victim.dtype]
            offset_bytes = _element(stream, victim, item) * item
            size_bytes = min(_ZEROED_BYTES, victim.size_bytes - offset_bytes)
        stream.seek(victim.start_byte + offset_bytes)
        for written in range(0, size_bytes, _SCAN_BYTES):
            stream.write(bytes(min(_SCAN_BYTES, size_bytes - written)))
    return {"byte_offset": victim.start_byte + offset_bytes}


def _swap(victim: _Victim) -> dict[str, int | None]:
    """Exchange two shards, as a copy tool that mixes up ranks does."""
    if victim.other is not None:
        aside = victim.path.with_name(f".{victim.path.name}.swap")
        victim.path.rename(aside)
        victim.other.rename(victim.path)
        aside.rename(victim.other)
    return {}


def _replace(victim: _Victim) -> dict[str, int | None]:
    """Put the content of another step's file in its place, as an incomplete upload leaves it."""
    if victim.other is not None:
        shutil.copyfile(victim.other, victim.path)
    return {}


def _delete(victim: _Victim) -> dict[str, int | None]:
    """Remove the file."""
    victim.path.unlink()
    return {}


_KINDS: Mapping[DamageKind, Callable[[_Victim], dict[str, int | None]]] = {
    DamageKind.BIT_FLIP: _flip_bit,
    DamageKind.HEADER_FLIP: _flip_header,
    DamageKind.TRUNCATE: _truncate,
    DamageKind.ZERO_FILL: _zero,
    DamageKind.DELETE: _delete,
    DamageKind.SWAP: _swap,
    DamageKind.FOREIGN_SHARD: _replace,
}
