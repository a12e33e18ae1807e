"""Finds the members of the zips that torch writes, as absolute byte ranges; unpacks nothing.

A DCP shard is many zips one after another, so a zip is read through a window on its file. The
central directory gives names and sizes (torch leaves them out of the local headers), then each
local header gives where the bytes start.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ckptdrill.errors import UserError

_LOCAL_HEADER_BYTES = 30
# The largest read zipfile makes is the central directory: this is some 50,000 members.
_MAX_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Member:
    """One stored member: bytes `start_byte` to `start_byte + size_bytes` of the file."""

    name: str
    start_byte: int
    size_bytes: int


class _Window(io.RawIOBase):
    """Bytes `start` to `start + size` of a descriptor, as a file that only reads."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._start = start
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the start")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        wanted = left if size < 0 else min(size, left)
        if wanted > _MAX_READ_BYTES:
            raise ValueError(f"a directory of more than {_MAX_READ_BYTES} bytes")
        data = os.pread(self._descriptor, wanted, self._start + self._position)
        self._position += len(data)
        return data


def members(
    path: Path, offset_bytes: int = 0, length_bytes: int | None = None
) -> tuple[Member, ...]:
    """The members of the zip at bytes `offset_bytes` to `offset_bytes + length_bytes` of `path`
    (None: to its end), in the order of its directory.

    Raises UserError when there is no whole zip that fills the range, or a member is compressed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            available = os.fstat(descriptor).st_size - offset_bytes
            size = available if length_bytes is None else length_bytes
            if size > available:
                raise ValueError(f"{size} bytes wanted at byte {offset_bytes}, {available} there")
            return _members(descriptor, offset_bytes, size)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise UserError(f"no file {path.name}", where=str(path.parent)) from error
    except (OSError, ValueError, LookupError, NotImplementedError, struct.error) as error:
        raise UserError(f"not a whole zip archive: {error}", where=str(path)) from error
    except zipfile.BadZipFile as error:
        raise UserError(f"not a whole zip archive: {error}", where=str(path)) from error


def _members(descriptor: int, start: int, size: int) -> tuple[Member, ...]:
    with zipfile.ZipFile(_Window(descriptor, start, size)) as archive:
        entries = archive.infolist()
    if min((entry.header_offset for entry in entries), default=0) != 0:
        raise ValueError("it does not begin where its first member begins")
    found = tuple(_member(descriptor, start, size, entry) for entry in entries)
    _refuse_overlaps(found)
    return found


def _refuse_overlaps(found: tuple[Member, ...]) -> None:
    """Members that share bytes let a small file claim to hold any amount of data."""
    end = 0
    for member in sorted(found, key=lambda each: each.start_byte):
        if member.start_byte < end:
            raise ValueError(f"member {member.name[:200]!r} overlaps another one")
        end = member.start_byte + member.size_bytes


def _member(descriptor: int, start: int, size: int, entry: zipfile.ZipInfo) -> Member:
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise ValueError(f"member {entry.filename!r} is compressed")
    header = os.pread(descriptor, _LOCAL_HEADER_BYTES, start + entry.header_offset)
    if len(header) != _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError(f"member {entry.filename!r} has no local header")
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
    first = entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if first + entry.file_size > size:
        raise ValueError(f"member {entry.filename!r} ends outside")
    return Member(entry.filename, start + first, entry.file_size)


def read_member(path: Path, member: Member, limit_bytes: int) -> bytes:
    """The bytes of a member of `path`.

    Raises UserError when it is larger than `limit_bytes` or cannot be read.
    """
    if member.size_bytes > limit_bytes:
        raise UserError(
            f"{member.name} has {member.size_bytes} bytes, over the limit of {limit_bytes}",
            where=str(path),
        )
    try:
        with path.open("rb") as stream:
            stream.seek(member.start_byte)
            return stream.read(member.size_bytes)
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=str(path)) from error
