"""Keeps the source checkpoint out of reach of what is drilled, and notices when it was reached.

A job gets a private copy, never the path of the source. First the source is looked over (links that
leave it and special files are refused), then every file is cloned where the file system can share
blocks, or else copied, after checking that there is space. Never a hard link: a job that opens its
checkpoint in place would write through it. `snapshot` before and after, and `changes` between them,
then say in words whether the source stayed as it was; `glance` in between reads no content.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import xxhash

from ckptdrill.errors import UserError

# _IOW(0x94, 9, int) of linux/fs.h: share the blocks of one file with another, copied on write.
_FICLONE = 0x40049409
_BLOCK_BYTES = 8 << 20
_THREADS = min(8, os.cpu_count() or 1)

Snapshot = Mapping[str, list[int | str]]
_DIGEST = 3  # its place in a record; a glance has none


class GuardLevel(StrEnum):
    """What stands between a job and the source checkpoint."""

    REFLINK = "reflink"  # a clone: blocks are shared until one side writes
    COPY = "copy"  # a full copy
    READ_ONLY_BIND = "read-only-bind"  # beside a copy: the source is mounted read-only


def guard_in_words(copy: str | None, refused: str | None, *, bound: bool) -> str:
    """`reflink, read-only-bind`, or why the second is missing, from what a launch recorded: the
    level of its private copy, whether it saw sources read-only, and what the kernel said instead.
    """
    bind = GuardLevel.READ_ONLY_BIND.value if bound else ""
    if refused:
        bind = f"no {GuardLevel.READ_ONLY_BIND} ({refused})"
    return ", ".join(filter(None, (copy, bind)))


def private_copy(source: Path, destination: Path) -> GuardLevel:
    """Copy the file or folder `source` to `destination`, which must not exist yet.

    Times and permissions are kept, but the owner may always write. Links within the source stay
    links. REFLINK is returned when every file could be cloned, COPY when one could not. Raises
    UserError for a missing source, a link out of it, a special file, too little space, or a
    destination that exists or lies within the source; nothing is left behind then.
    """
    root = _real(source)
    if os.path.lexists(destination):
        raise UserError("the place for a private copy is taken", where=str(destination))
    if destination.parent.resolve().is_relative_to(root):
        raise UserError("a private copy cannot lie inside its source", where=str(destination))
    entries = list(_entries(root))
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        return _copy_all(root, destination, entries)
    except OSError as error:
        _remove(destination)
        raise UserError(
            f"cannot copy {source}: {error.strerror or error}",
            where=str(destination),
            hint="free some space, or choose another --runs folder",
        ) from error
    except UserError:
        _remove(destination)
        raise


def examine(source: Path) -> None:
    """Raise the UserError that `private_copy` would raise for what `source` holds."""
    for _ in _entries(_real(source)):
        pass


def _real(source: Path) -> Path:
    """The source with links in its own path followed: `latest` stands for what it points to."""
    try:
        return source.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise UserError("no checkpoint here", where=str(source)) from error


def _entries(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything from `root` down, folders before what they hold.

    Raises UserError for links out of the root and for what is no file, folder or link.
    """
    status = root.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UserError("a checkpoint cannot be a bare link", where=str(root))
    yield root, status
    if stat.S_ISDIR(status.st_mode):
        for folder, folders, names in os.walk(root, onerror=_unreadable):
            folders.sort()
            for name in sorted((*folders, *names)):
                path = Path(folder, name)
                yield path, _checked(path, root)


def _unreadable(error: OSError) -> None:
    raise UserError(f"cannot read: {error.strerror}", where=str(error.filename)) from error


def _checked(path: Path, root: Path) -> os.stat_result:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        _stay_inside(path, root)
    elif not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise UserError("neither a file nor a folder nor a link", where=str(path))
    return status


def _stay_inside(link: Path, root: Path) -> None:
    target = link.readlink()
    lexical = Path(os.path.normpath(link.parent / target))
    real = Path(os.path.realpath(link))
    if target.is_absolute() or not (lexical.is_relative_to(root) and real.is_relative_to(root)):
        raise UserError(
            f"the link {link.name} leaves the checkpoint: a job could write through it",
            where=str(link),
            hint="replace the link by the file that it points to",
        )


def _copy_all(
    root: Path, destination: Path, entries: list[tuple[Path, os.stat_result]]
) -> GuardLevel:
    files = [(path, status) for path, status in entries if stat.S_ISREG(status.st_mode)]
    folders = [(path, status) for path, status in entries if stat.S_ISDIR(status.st_mode)]
    for path, _ in folders:
        (destination / path.relative_to(root)).mkdir(mode=0o700)
    for path, status in entries:
        if stat.S_ISLNK(status.st_mode):
            (destination / path.relative_to(root)).symlink_to(path.readlink())
    level = _copy_files(root, destination, files)
    for path, status in reversed(folders):  # the innermost first: filling a folder changes its time
        _like(destination / path.relative_to(root), status)
    return level


def _copy_files(
    root: Path, destination: Path, files: list[tuple[Path, os.stat_result]]
) -> GuardLevel:
    level = GuardLevel.REFLINK
    for number, (path, status) in enumerate(files):
        target = destination / path.relative_to(root) if path != root else destination
        if level is GuardLevel.REFLINK and not _clone(path, target):
            level = GuardLevel.COPY
            _enough_space(sum(_stored_bytes(s) for _, s in files[number:]), destination)
        if level is GuardLevel.COPY:
            _copy(path, target)
        _like(target, status)
    return level


def _clone(source: Path, target: Path) -> bool:
    """Whether `target` now shares the blocks of `source`; if not, `target` is an empty file."""
    with source.open("rb") as reader, target.open("wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            return False  # another file system, or one that cannot share blocks
    return True


def _copy(source: Path, target: Path) -> None:
    """Copy what is stored; holes stay holes, so that a sparse file needs no more than it had."""
    with source.open("rb") as reader, target.open("wb") as writer:
        size_bytes = os.fstat(reader.fileno()).st_size
        os.truncate(writer.fileno(), size_bytes)
        for begin, end in _stored(reader.fileno(), size_bytes):
            for descriptor in (reader.fileno(), writer.fileno()):
                os.lseek(descriptor, begin, os.SEEK_SET)
            left_bytes = end - begin
            while left_bytes > 0 and (moved := _move_block(reader, writer, left_bytes)):
                left_bytes -= moved


def _stored(descriptor: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each part of a file that is no hole."""
    end = 0
    while end < size_bytes:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end


def _move_block(reader: BinaryIO, writer: BinaryIO, left_bytes: int) -> int:
    """Bytes copied, in the kernel where it can between these two file systems; 0 at the end."""
    count = min(left_bytes, _BLOCK_BYTES)
    try:
        return os.copy_file_range(reader.fileno(), writer.fileno(), count)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return os.sendfile(writer.fileno(), reader.fileno(), None, count)


def _stored_bytes(status: os.stat_result) -> int:
    """What a file occupies; of a sparse one, that is less than its size."""
    return min(status.st_size, status.st_blocks * 512)


def _enough_space(needed_bytes: int, destination: Path) -> None:
    free_bytes = shutil.disk_usage(destination.parent).free
    if needed_bytes > free_bytes:
        needed_mb, free_mb = needed_bytes / 1e6, free_bytes / 1e6
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination.parent))
        raise UserError(
            f"a private copy needs {needed_mb:,.1f} MB, {free_mb:,.1f} MB are free",
            where=str(destination.parent),
            hint="free some space, or put --runs on a file system that can clone files",
        ) from full


def _like(target: Path, status: os.stat_result) -> None:
    """Permissions and times of the source; the owner may write."""
    writable = stat.S_IRUSR | stat.S_IWUSR | (stat.S_IXUSR if target.is_dir() else 0)
    target.chmod(stat.S_IMODE(status.st_mode) | writable)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# Did the source stay as it was?


def snapshot(root: Path) -> dict[str, list[int | str]]:
    """[size in bytes, mtime in ns, inode, xxh3_128 hex] of every file below `root`, by relative
    path; of a single file, by its name.

    Links are recorded by what they say, special files by being there; neither is opened. What
    vanishes meanwhile is left out. Names that are not UTF-8 are escaped. Raises UserError when
    something cannot be read.
    """
    return _recorded(root, _record)


def glance(root: Path) -> dict[str, list[int | str]]:
    """`snapshot` with no digests, which `changes` takes as equal: content is not read."""
    return _recorded(root, _glance)


def _recorded(
    root: Path, record: Callable[[Path], list[int | str] | None]
) -> dict[str, list[int | str]]:
    paths = list(_below(root))
    with ThreadPoolExecutor(_THREADS) as threads:
        records = list(threads.map(record, paths))
    base = root if root.is_dir() else root.parent
    return {
        _text_of(path.relative_to(base)): each
        for path, each in zip(paths, records, strict=True)
        if each is not None
    }


def _text_of(path: Path) -> str:
    """A path as text that can be written as UTF-8, different for different paths."""
    return os.fsencode(path).replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def _below(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders.sort()
        links = [name for name in folders if Path(folder, name).is_symlink()]
        yield from (Path(folder, name) for name in sorted((*names, *links)))


def _record(path: Path) -> list[int | str] | None:
    try:
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return _record_file(path)
        digest = "special"
        if stat.S_ISLNK(status.st_mode):
            digest = xxhash.xxh3_128_hexdigest(os.fsencode(path.readlink()))
        return [status.st_size, status.st_mtime_ns, status.st_ino, digest]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=str(path)) from error


def _record_file(path: Path) -> list[int | str]:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        status = os.fstat(stream.fileno())
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return [status.st_size, status.st_mtime_ns, status.st_ino, digest.hexdigest()]


def _glance(path: Path) -> list[int | str] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def changes(before: Snapshot, after: Snapshot) -> dict[str, str]:
    """What differs between two snapshots: path and, in words, how; empty when nothing does."""
    found = {path: _change(before.get(path), after.get(path)) for path in sorted({*before, *after})}
    return {path: how for path, how in found.items() if how}


def _change(before: list[int | str] | None, after: list[int | str] | None) -> str | None:
    if before is None:
        return "added"
    if after is None:
        return "removed"
    digests_differ = len(after) > _DIGEST and before[_DIGEST] != after[_DIGEST]
    if before[0] != after[0] or digests_differ:
        return "content changed"
    if before[2] != after[2]:
        return "replaced by a file of the same content"
    return "touched (mtime)" if before[1] != after[1] else None
