"""Where the manifest of a checkpoint lies, and how it is read and written.

A folder holds it as `checkpoint.manifest.json`; one file has it beside itself as
`NAME.manifest.json`. It is written so that a reader sees no manifest or a whole one: a temporary
name, fsync, rename, fsync of the folder. Its own modification time is set to the commit time that
it records. As long as both agree, the times beside it are those of the writer, not of a copy, and
may be compared.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from pydantic import ValidationError

from ckptdrill.errors import UserError
from ckptdrill.manifest.files import Listing, fsync_folder, open_inside
from ckptdrill.manifest.record import MANIFEST_VERSION, Manifest, ProblemError, ProblemKind
from ckptdrill.manifest.times import ns_of_utc

FOLDER_NAME = "checkpoint.manifest.json"
SUFFIX = ".manifest.json"
_TEMPORARY = re.compile(r"\..+\.manifest\.json\.\d+\.tmp")
# Some 100,000 files; parsed, it takes several times that much memory.
_MAX_SIZE_BYTES = 16 << 20
# What no manifest may leave to a default: `{}` would be a committed one.
_ALWAYS_THERE = {"manifest_version", "status", "files"}


def path_of(checkpoint: Path) -> Path:
    """Where the manifest of `checkpoint` belongs."""
    if checkpoint.is_dir():
        return checkpoint / FOLDER_NAME
    return checkpoint.with_name(f"{checkpoint.name}{SUFFIX}")


def without_manifest(checkpoint: Path, found: Listing) -> Listing:
    """`found` without the manifest of a folder and what a killed writer of it left."""
    if not checkpoint.is_dir():
        return found
    kept = {
        path: stamp
        for path, stamp in found.files.items()
        if path != FOLDER_NAME and not _TEMPORARY.fullmatch(path)
    }
    return dataclasses.replace(found, files=kept)


def read(path: Path) -> Manifest:
    """The manifest at `path`, opened only if it is a regular file.

    Raises ProblemError with `manifest-missing`, `manifest-unreadable` or `version-unknown`.
    """
    data = _content(path)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise _unusable(path, data, error) from error
    if manifest.manifest_version != MANIFEST_VERSION:
        raise _newer(path, manifest.manifest_version)
    if not manifest.files or not manifest.model_fields_set >= _ALWAYS_THERE:
        what = "it records no file, or leaves out its version or status"
        raise ProblemError(ProblemKind.MANIFEST_UNREADABLE, path.name, what)
    named = [file.path for file in manifest.files] + [link.path for link in manifest.links]
    if len(set(named)) != len(named):
        what = "it names a path twice"
        raise ProblemError(ProblemKind.MANIFEST_UNREADABLE, path.name, what)
    return manifest


def _content(path: Path) -> bytes:
    try:
        with os.fdopen(open_inside(path.parent, path.name), "rb") as stream:
            data = stream.read(_MAX_SIZE_BYTES + 1)
    except ProblemError as refused:
        missing = refused.problem.kind is ProblemKind.MISSING
        kind = ProblemKind.MANIFEST_MISSING if missing else ProblemKind.MANIFEST_UNREADABLE
        raise ProblemError(kind, path.name, refused.problem.explanation) from refused
    except OSError as error:
        what = error.strerror or str(error)
        raise ProblemError(ProblemKind.MANIFEST_UNREADABLE, path.name, what) from error
    if len(data) > _MAX_SIZE_BYTES:
        what = f"over the limit of {_MAX_SIZE_BYTES} bytes"
        raise ProblemError(ProblemKind.MANIFEST_UNREADABLE, path.name, what)
    return data


def _unusable(path: Path, data: bytes, error: ValidationError) -> ProblemError:
    """A newer version may have other keys: that is said first."""
    found = re.search(rb'"manifest_version"\s*:\s*(\d{1,9})\b', data)
    if found is not None and int(found[1]) != MANIFEST_VERSION:
        return _newer(path, int(found[1]))
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    what = f"{where}: {first['msg']}" if where else first["msg"]
    return ProblemError(ProblemKind.MANIFEST_UNREADABLE, path.name, what[:300])


def _newer(path: Path, version: int) -> ProblemError:
    what = f"version {version}, this ckptdrill reads {MANIFEST_VERSION}"
    return ProblemError(ProblemKind.VERSION_UNKNOWN, path.name, what)


def times_kept(path: Path, manifest: Manifest) -> bool:
    """Whether the file at `path` still has the time that it records: neither copied nor touched."""
    recorded = ns_of_utc(manifest.storage.durable_commit_time_utc)
    try:
        return recorded is not None and os.lstat(path).st_mtime_ns == recorded
    except OSError:
        return False


def write(path: Path, manifest: Manifest) -> None:
    """Put the manifest at `path`, whole and durable, with its recorded time as its own.

    Raises UserError when the folder cannot be written, or the manifest would be too large to read.
    """
    data = manifest.to_json().encode()
    if len(data) > _MAX_SIZE_BYTES:
        raise UserError(
            f"{len(manifest.files)} files make a manifest of {len(data)} bytes, over the limit of "
            f"{_MAX_SIZE_BYTES}",
            hint="record the folders of the checkpoint one by one",
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        recorded = ns_of_utc(manifest.storage.durable_commit_time_utc)
        write_durable(temporary, data, modified_ns=recorded)
        temporary.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise UserError(
            f"cannot write {path.name}: {error.strerror or error}",
            where=str(path.parent),
            hint="make the folder writable, or write the manifest elsewhere with --output",
        ) from error


def write_durable(path: Path, data: bytes, *, modified_ns: int | None = None) -> None:
    """A new file at `path`, on disk when this returns, with that modification time if one is
    given. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if modified_ns is not None:
            os.utime(descriptor, ns=(modified_ns, modified_ns))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
