"""Puts a finished checkpoint in its place so that no reader ever takes half of it for whole.

In this order: the staged checkpoint is hashed and every shard that it should hold is looked for; a
manifest that says `in_progress` is written; the checkpoint is renamed into place (or copied and
verified first, where it lies on another file system or its files have other names); all of it is
made durable; the manifest is replaced by one that says `committed`; the `latest` pointer is moved.
Whatever is cut off in between leaves the older generations as they were and this one uncommitted,
and the same command once more continues it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptdrill import isolate
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.manifest import sidecar
from ckptdrill.manifest.describing import commit, describe, existing
from ckptdrill.manifest.files import Listing, fsync_folder, listing
from ckptdrill.manifest.record import Facts, Manifest, ProblemError, ProblemKind, Status
from ckptdrill.manifest.selecting import POINTER_NAME, pointer_text
from ckptdrill.manifest.verifying import verify

_LOCK_NAME = ".publish.lock"
_COPY_SUFFIX = ".publishing"


@dataclass(frozen=True)
class Published:
    """A checkpoint in its place. `pointer_moved` is False where a newer one is pointed to."""

    path: Path
    manifest: Manifest
    pointer_moved: bool


def publish(
    staged: Path, target: Path, facts: Facts | None = None, *, workers: int | None = None
) -> Published:
    """Publish the folder or file `staged` as `target`, which must not exist, and point to it.

    A manifest in `staged` that its writer left there is what `staged` has to fulfil; its facts
    stand where `facts` set nothing else. On the same file system `staged` is moved, else it is
    copied and left where it is. A publish that was cut off is continued. Raises UserError: exit
    code 1 when `staged` is not whole or changes meanwhile, 2 when `target` is taken or another
    publish is at work beside it.
    """
    target = _place(target)
    with _locked(target.parent):
        record = _continued(staged, target, workers)
        if record is None:
            record = _put(existing(staged), target, facts, workers)
        if record.status is not Status.COMMITTED:
            record = commit(target, record)
        return Published(target, record, _point(target, record))


def _place(target: Path) -> Path:
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UserError(f"no folder {parent} to publish into", hint="make it first")
    pointer = parent / POINTER_NAME
    if os.path.lexists(pointer) and not (pointer.is_symlink() or pointer.is_file()):
        raise UserError(
            f"{pointer} is neither a file nor a link, and the pointer goes there",
            hint="rename it: `latest` has to be a pointer, never a checkpoint",
        )
    return parent.resolve() / target.name


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the one right to publish into `folder`; a killed holder loses it."""
    try:
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            "another publish is at work here", where=str(folder), hint="wait for it to end"
        ) from error
    except OSError as error:
        raise UserError(
            f"the file system cannot lock {_LOCK_NAME}: {error.strerror or error}",
            where=str(folder),
            hint="without a lock two publishers could meet: publish on a POSIX file system",
        ) from error


def _continued(staged: Path, target: Path, workers: int | None) -> Manifest | None:
    """The record of a publish of `target` that was cut off; None if there was none.

    Raises UserError when `target` is taken, or is not what its record says.
    """
    if not os.path.lexists(target):
        return None
    try:
        record = sidecar.read(sidecar.path_of(target))
    except ProblemError:
        record = None
    if record is None or os.path.lexists(staged):
        raise UserError(
            f"{target} exists: a generation is never replaced",
            hint="publish under another name, or remove it first if it is not worth keeping",
        )
    _refuse_problems(target, record, workers)
    return record


def _put(staged: Path, target: Path, facts: Facts | None, workers: int | None) -> Manifest:
    """Bring `staged` to the place `target`, with a manifest in progress; its record."""
    if target.is_relative_to(staged):
        raise UserError(f"{target} would lie inside of {staged}", hint="name another place")
    expected = _expected(staged)
    before = sidecar.without_manifest(staged, listing(staged))
    record = describe(staged, _merged(expected, facts), status=Status.IN_PROGRESS, workers=workers)
    if expected is not None:
        _refuse_problems(staged, expected, workers)
    moved = _movable(staged, target, before)
    _rename(staged if moved else _copied(staged, target, record, workers), target, record)
    if moved:
        _refuse_changed(before, target)
        if expected is not None and target.is_file():
            sidecar.path_of(staged).unlink(missing_ok=True)
    return record


def _rename(source: Path, target: Path, record: Manifest) -> None:
    """Give `source`, with its manifest, the name `target`."""
    sidecar.write(sidecar.path_of(source if source.is_dir() else target), record)
    try:
        source.rename(target)
        fsync_folder(source.parent)
    except OSError as error:
        what = f"cannot publish {target.name}: {error.strerror or error}"
        raise UserError(what, where=str(target.parent)) from error


def _expected(staged: Path) -> Manifest | None:
    """What the writer says the staged checkpoint has to hold, if it says so."""
    try:
        return sidecar.read(sidecar.path_of(staged))
    except ProblemError as error:
        if error.problem.kind is ProblemKind.MANIFEST_MISSING:
            return None
        raise _not_whole(str(error.problem), staged) from error


def _merged(expected: Manifest | None, facts: Facts | None) -> Facts:
    """The facts of the writer, and over them those that were given now.

    Raises UserError when the two name different steps.
    """
    merged = {} if expected is None else {n: getattr(expected, n) for n in Facts.model_fields}
    given = facts or Facts()
    recorded, named = merged.get("completed_step"), given.completed_step
    if recorded is not None and named not in (None, recorded):
        raise UserError(
            f"step {named} was given, but the writer recorded step {recorded}",
            hint="leave the step out, or look whether this is the checkpoint that you mean",
        )
    return Facts(**merged | {name: getattr(given, name) for name in given.model_fields_set})


def _refuse_problems(checkpoint: Path, record: Manifest, workers: int | None) -> None:
    problems = [
        problem
        for problem in verify(checkpoint, record, workers=workers)
        if problem.kind is not ProblemKind.NOT_COMMITTED
    ]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise _not_whole(f"{problems[0]}{more}", checkpoint)


def _refuse_changed(before: Listing, target: Path) -> None:
    """Nobody wrote to the files between the hashing and their arrival."""

    def written(found: Listing) -> list[tuple[int, int, int]]:
        return sorted((s.inode, s.size_bytes, s.modified_ns) for s in found.files.values())

    after = sidecar.without_manifest(target, listing(target))
    if written(after) != written(before):
        raise _not_whole("a file changed while the checkpoint was published", target)


def _not_whole(what: str, checkpoint: Path) -> UserError:
    return UserError(
        f"not published: {what}",
        where=str(checkpoint),
        hint="the older generations are as they were; save again",
        code=ExitCode.UNSUPPORTED,
    )


# --------------------------------------------------------------------------------------------------
# Where it cannot simply be moved


def _movable(staged: Path, target: Path, found: Listing) -> bool:
    """Whether a rename does it: one file system, and no other name through which a file could
    still be written.
    """
    return staged.stat().st_dev == target.parent.stat().st_dev and not found.hard_linked


def _copied(staged: Path, target: Path, record: Manifest, workers: int | None) -> Path:
    """A verified private copy of `staged` beside `target`."""
    copy = target.with_name(f".{target.name}{_COPY_SUFFIX}")
    if copy.is_dir() and not copy.is_symlink():
        shutil.rmtree(copy)
    else:
        copy.unlink(missing_ok=True)
    isolate.private_copy(staged, copy)
    if copy.is_dir():
        sidecar.path_of(copy).unlink(missing_ok=True)
    _refuse_problems(copy, record, workers)
    return copy


# --------------------------------------------------------------------------------------------------
# The pointer


def _point(target: Path, record: Manifest) -> bool:
    """Let `latest` beside `target` name it, unless it names a newer one; whether it was moved.

    What is a symbolic link stays one.
    """
    pointer = target.parent / POINTER_NAME
    if _names_newer(pointer, record):
        return False
    temporary = pointer.with_name(f".{POINTER_NAME}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        if pointer.is_symlink():
            temporary.symlink_to(target.name)
        else:
            sidecar.write_durable(temporary, f"{target.name}\n".encode())
        temporary.replace(pointer)
        fsync_folder(pointer.parent)
    except OSError as error:
        what = f"{target.name} is committed, but the pointer could not be moved"
        raise UserError(what, where=f"{pointer}: {error.strerror or error}") from error
    return True


def _names_newer(pointer: Path, record: Manifest) -> bool:
    try:
        other = sidecar.read(sidecar.path_of(pointer.parent / pointer_text(pointer)))
    except (OSError, ValueError, ProblemError):
        return False
    if other.status is not Status.COMMITTED or other.completed_step is None:
        return False
    # A record that tells no step is behind every one that does, as it is for `select`.
    return record.completed_step is None or other.completed_step > record.completed_step
