"""Lists and opens the files of a checkpoint without ever leaving it.

A checkpoint is untrusted: paths from a manifest are opened component by component from the folder
down, and neither a symbolic link nor anything but a regular file is ever opened.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptdrill.manifest.record import ProblemError, ProblemKind


@dataclass(frozen=True)
class Stamp:
    """What changes when a file is written, cut or replaced; times in nanoseconds."""

    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """The stamp in the answer of the file system."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class Listing:
    """Everything below a checkpoint by relative path with `/`: regular files, the text of symbolic
    links, and what is neither (pipes, sockets, devices). `folders` holds "." too.
    """

    files: dict[str, Stamp] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    hard_linked: list[str] = field(default_factory=list)


def base(checkpoint: Path) -> Path:
    """The folder that relative paths start from: the checkpoint, or the parent of a single file."""
    return checkpoint if checkpoint.is_dir() else checkpoint.parent


def listing(checkpoint: Path) -> Listing:
    """What is at `checkpoint`, links not followed, in no particular order.

    A folder that cannot be listed is in `unreadable`. A checkpoint of one file holds just that.
    """
    found = Listing()
    if not checkpoint.is_dir():
        _sort_in(found, checkpoint.name, os.lstat(checkpoint), checkpoint)
        return found
    todo = ["."]
    while todo:
        folder = todo.pop()
        found.folders.append(folder)
        try:
            with os.scandir(checkpoint / folder) as entries:
                for entry in entries:
                    name = entry.name if folder == "." else f"{folder}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(name)
                    else:
                        _sort_in(found, name, entry.stat(follow_symlinks=False), Path(entry.path))
        except OSError as error:
            found.unreadable[folder] = error.strerror or str(error)
    return found


def _sort_in(found: Listing, name: str, status: os.stat_result, path: Path) -> None:
    if stat.S_ISREG(status.st_mode):
        found.files[name] = Stamp.of(status)
        if status.st_nlink > 1:
            found.hard_linked.append(name)
    elif stat.S_ISLNK(status.st_mode):
        found.links[name] = str(path.readlink())
    else:
        found.others.append(name)


def escapes(relative: str) -> bool:
    """Whether a path out of a manifest is anything but a plain way down."""
    parts = relative.split("/")
    return "\0" in relative or any(part in ("", ".", "..") for part in parts)


def link_escapes(path: str, target: str) -> bool:
    """Whether the link at relative `path`, read as text, leads out of the checkpoint."""
    if target.startswith("/"):
        return True
    depth = len(PurePosixPath(path).parts) - 1
    for part in PurePosixPath(target).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def open_inside(root: Path, relative: str) -> int:
    """A descriptor for reading of the regular file `relative` below `root`, never through a link.

    Raises ProblemError with `path-escapes`, `missing`, `not-a-file` or `unreadable`.
    """
    if escapes(relative):
        raise ProblemError(
            ProblemKind.PATH_ESCAPES, relative, "not a plain path below the checkpoint"
        )
    *folders, name = relative.split("/")
    down = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        folder = os.open(root, down)
        try:
            for part in folders:
                folder, above = os.open(part, down | os.O_NOFOLLOW, dir_fd=folder), folder
                os.close(above)
            return _open_regular(folder, name, relative)
        finally:
            os.close(folder)
    except OSError as error:
        raise refusal(relative, error) from error


def _open_regular(folder: int, name: str, relative: str) -> int:
    if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise ProblemError(
            ProblemKind.NOT_A_FILE, relative, "not a regular file; it was not opened"
        )
    # Should it have become a pipe since, opening it must not wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ProblemError(ProblemKind.NOT_A_FILE, relative, "replaced by something else meanwhile")
    return descriptor


def refusal(relative: str, error: OSError) -> ProblemError:
    """The problem that an error of the system about `relative` stands for."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOENT:
        return ProblemError(ProblemKind.MISSING, relative, "no such file")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return ProblemError(
            ProblemKind.NOT_A_FILE, relative, "reached through a link or a file only"
        )
    return ProblemError(ProblemKind.UNREADABLE, relative, reason)


def fsync_all(checkpoint: Path, found: Listing) -> None:
    """Make the listed files of a checkpoint durable, then the names in its folders, then its own.

    Raises OSError, and ProblemError for a file that is none any more.
    """
    root = base(checkpoint)
    for path in sorted(found.files):
        _fsync(open_inside(root, path))
    for folder in sorted(found.folders, reverse=True):
        fsync_folder(checkpoint / folder)
    fsync_folder(checkpoint.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises OSError."""
    _fsync(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
