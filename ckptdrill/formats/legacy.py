"""Reads what torch.save wrote before version 1.6, and still writes when it is told to.

Not a zip: five pickles one after another (a magic number, a version, facts of the machine, the
content, the keys of the storages), then for each storage its number of elements and its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.formats import archive, pickles
from ckptdrill.formats.layout import ITEM_SIZE_BYTES, STORAGE_DTYPE

MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_VERSION = 1001
_MAX_STORAGES = 30_000
_MAX_VISITS = 500_000


def load(path: Path) -> tuple[Any, dict[str, archive.Member], dict[str, str]]:
    """(content as `pickles.load` gives it, storages by key as byte ranges, notes).

    Raises UserError when it is damaged, cut short, or of a big-endian machine.
    """
    where = str(path)
    data = _beginning(path)
    _, position = pickles.load_next(data, 0, where)
    version, position = pickles.load_next(data, position, where)
    machine, position = pickles.load_next(data, position, where)
    content, position = pickles.load_next(data, position, where)
    keys, position = pickles.load_next(data, position, where)
    if version != _VERSION or not isinstance(keys, list) or len(keys) > _MAX_STORAGES:
        raise UserError("not a torch.save file of the legacy format", where=where)
    if pickles.texts(machine, 64).get("little_endian") is not True:
        raise UserError("saved on a big-endian machine, which is not supported", where=where)
    return content, _storages(path, position, keys, _dtypes(content)), {"version": "legacy"}


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(pickles.MAX_SIZE_BYTES)
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=str(path)) from error


def _dtypes(content: Any) -> dict[str, str]:
    """The element type of each storage, from the references to it."""
    found: dict[str, str] = {}
    for reference in _references(content):
        parts = reference.identifier
        if isinstance(parts, tuple) and len(parts) >= 3 and isinstance(parts[1], pickles.Symbol):
            kind, key = parts[1].name, parts[2]
            if kind in STORAGE_DTYPE and isinstance(key, str):
                found[key] = STORAGE_DTYPE[kind]
    return found


def _references(content: Any) -> Iterator[pickles.Persistent]:
    """Every reference to a storage, each container being looked into once."""
    waiting, seen = [content], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, pickles.Persistent):
            yield value
        elif isinstance(value, (list, tuple, pickles.Made)) and id(value) not in seen:
            seen.add(id(value))
            waiting += _inside(value)
            if len(seen) > _MAX_VISITS or len(waiting) > 4 * _MAX_VISITS:
                raise pickles.Refused("the containers in the file hold more than any checkpoint")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, pickles.Made):
        return [value.args, value.state, value.items]
    return list(value)


def _storages(
    path: Path, position: int, keys: list[Any], dtypes: dict[str, str]
) -> dict[str, archive.Member]:
    found: dict[str, archive.Member] = {}
    with path.open("rb") as stream:
        size_bytes = stream.seek(0, 2)
        for key in keys:
            stream.seek(position)
            count = int.from_bytes(stream.read(8), "little")
            if not isinstance(key, str) or key not in dtypes or key in found:
                raise UserError("a damaged list of storages", where=str(path))
            length = count * ITEM_SIZE_BYTES[dtypes[key]]
            if position + 8 + length > size_bytes:
                raise UserError("the file ends in the middle of a tensor", where=str(path))
            found[key] = archive.Member(key, position + 8, length)
            position += 8 + length
    return found
