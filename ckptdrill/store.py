"""Every path of a run, and the only code that writes one. Nobody else joins paths.

The run folder is the packet: facts are written first (append-only JSON lines, journal fsynced),
derived files last and atomically (temporary name, fsync, rename, fsync of the directory), and
`manifest-sha256.txt` lists them all so that `sha256sum -c` alone can verify it later.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ckptdrill.errors import ExitCode, UserError

RUN_FORMAT_VERSION = 2  # 1 told the facts of tensors leaf by leaf; such runs are read as ever
MANIFEST_NAME = "manifest-sha256.txt"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# What is made over that list cannot be in it: these stand in a second, short list instead.
SEAL_NAME = "seal-sha256.txt"
ATTESTATION_NAME = "attestation.json"
APPROVAL_NAME = "approval.json"
# The page once more, with the approval on it: index.html is in the list that an approval speaks of.
APPROVED_PAGE_NAME = "approved.html"
SEALED = (MANIFEST_NAME, ATTESTATION_NAME, APPROVAL_NAME, APPROVED_PAGE_NAME)
COMPATIBILITY_NAME = "resume_compatibility.yaml"
# In the folder of a cell: the program that shows the same without the job.
REPRO_NAME = "repro.py"
# The manifest of the checkpoint that a run starts from, byte for byte, where it has one.
SOURCE_MANIFEST_NAME = "source.manifest.json"
# In the folder of a launch: the manifests of what it saved.
LAUNCH_MANIFESTS_NAME = "manifests.json"
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,120}")
# Scratch of running launches, and the checkpoints under drill: never evidence, never listed.
_NOT_EVIDENCE = ("work", "warm")


def safe_name(name: str) -> str:
    """`name` if it can be a folder name here.

    Raises UserError for anything that could leave the folder or confuse a shell.
    """
    if not _SAFE_NAME.fullmatch(name) or ".." in name:
        raise UserError(
            f"{name!r} cannot be a folder name",
            hint="use letters, digits, '.', '_', '+', '=' and '-', at most 120 of them",
        )
    return name


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    root: Path

    @property
    def run_json(self) -> Path:
        """Status, versions, argv."""
        return self.root / "run.json"

    @property
    def matrix(self) -> Path:
        """The matrix as it was, byte for byte."""
        return self.root / "matrix.yaml"

    @property
    def journal(self) -> Path:
        """One line per step that ended; what `--resume` reads."""
        return self.root / "journal.jsonl"

    @property
    def sources(self) -> Path:
        """What every checkpoint that is restored was and is, file by file."""
        return self.root / "sources.json"

    @property
    def lock(self) -> Path:
        """Held by the one ckptdrill process that writes here."""
        return self.root / ".lock"

    @property
    def observer_pack(self) -> Path:
        """The folder put on the job's PYTHONPATH; holds the package `ckptdrill_observer`."""
        return self.root / "observer"

    def launch(self, launch_id: str) -> Path:
        """Facts, output and exit of one launch."""
        return self.root / "launches" / safe_name(launch_id)

    def cell(self, cell_id: str) -> Path:
        """Plan, verdict and replay script of one cell."""
        return self.root / "cells" / safe_name(cell_id)

    def work(self, launch_id: str) -> Path:
        """Where a launch writes its checkpoints (`{out}`): not evidence, deleted after a Pass."""
        return self.root / "work" / safe_name(launch_id)

    def tier(self, launch_id: str) -> Path:
        """The record of what a launch found of a memory tier: files left and removed."""
        return self.launch(launch_id) / "tier.json"

    def damage(self, damage_id: str) -> Path:
        """The record of one damage: files, hashes before and after."""
        return self.root / "damages" / f"{safe_name(damage_id)}.json"

    def replay(self, replay_id: str) -> Path:
        """The record of one replay: points of interruption, and the states they leave."""
        return self.root / "replays" / f"{safe_name(replay_id)}.json"

    def conversion(self, conversion_id: str) -> Path:
        """The record of one conversion: command, seconds, what is wrong with its output."""
        return self.root / "conversions" / f"{safe_name(conversion_id)}.json"

    @property
    def warm(self) -> Path:
        """Control folders of the warm parents."""
        return self.root / "warm"


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write `path` so that a reader sees the old content or the new one, never a part; of what is
    not `durable` that holds but for a machine that loses its power.

    Raises UserError when the disk is full or the folder cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.replace(path)
        if durable:
            _fsync_directory(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """`write_atomic` of `value` as indented JSON with sorted keys."""
    write_atomic(path, _indented(value) + "\n", durable=durable)


def _indented(value: Any) -> str:
    """`json.dumps` with an indent encodes in Python; laying out its plain text is ten times as
    fast, where that text is JSON: a NaN is none.
    """
    plain = json.dumps(value, sort_keys=True, ensure_ascii=False)
    try:
        return msgspec.json.format(plain, indent=1)
    except msgspec.DecodeError:
        return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)


def read_json(path: Path) -> Any:
    """The JSON at `path`.

    Raises UserError when it is missing, cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"no file {path}", hint="is this the folder of a run?") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def append_line(path: Path, value: Any) -> None:
    """Append `value` as one JSON line, and return only when it is on disk.

    A torn last line, left by a kill or a full disk, is closed first so that it stays a single bad
    line instead of swallowing this one.
    """
    line = json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" + line if torn else line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _cannot_write(path, error) from error


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of every whole JSON line; torn lines, as kills leave
    them, are skipped.
    """
    if not path.exists():
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield number, json.loads(line)
            except ValueError:
                continue


def last_bytes(path: Path, count: int = 65536) -> bytes:
    """The end of a file; nothing where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - count))
            return stream.read()
    except OSError:
        return b""


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, streamed."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def evidence_files(root: Path) -> Iterator[Path]:
    """Every file of the packet, sorted; scratch, checkpoints under drill and the list itself left
    out.
    """
    for folder, folders, names in os.walk(root, followlinks=False):
        here = Path(folder)
        if here == root:
            folders[:] = [name for name in folders if name not in _NOT_EVIDENCE]
        folders.sort()
        for name in sorted(names):
            path = here / name
            if path.is_file() and not path.is_symlink() and not _is_bookkeeping(path, root):
                yield path


def _is_bookkeeping(path: Path, root: Path) -> bool:
    return path.parent == root and path.name in (*SEALED, SEAL_NAME, ".lock")


def write_manifest(root: Path) -> Path:
    """Write `manifest-sha256.txt` over all evidence, in the format of sha256sum."""
    lines = [
        f"{sha256_of(path)}  {path.relative_to(root).as_posix()}\n" for path in evidence_files(root)
    ]
    target = root / MANIFEST_NAME
    write_atomic(target, "".join(sorted(lines, key=lambda line: line[66:])))
    return target


def write_seal(root: Path) -> Path:
    """Write `seal-sha256.txt` over the list of checksums and what was made over that list."""
    lines = [f"{sha256_of(root / name)}  {name}\n" for name in SEALED if (root / name).is_file()]
    target = root / SEAL_NAME
    write_atomic(target, "".join(lines))
    return target


def file_system(path: Path) -> str:
    """The type of the file system that holds `path` (`xfs`, `nfs4`); `unknown` where the kernel
    does not tell.
    """
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    kinds: dict[str, str] = {}
    for line in mounts.splitlines():  # of several mounts at one place the last one is on top
        _, place, kind, *_ = line.split(" ")
        kinds[place.replace("\\040", " ")] = kind
    there = path.resolve()
    held = (kinds.get(str(folder)) for folder in (there, *there.parents))
    return next((kind for kind in held if kind), "unknown")


def tree_files(root: Path) -> Iterable[Path]:
    """Every regular file below `root` (or `root` itself), sorted, links not followed."""
    if root.is_file():
        return [root]
    return sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())


def _fsync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path.name}: {error.strerror or error}",
        where=str(path.parent),
        hint="free some space or choose another --runs folder, then continue with --resume",
        code=ExitCode.UNPROVEN if error.errno in _DISK_FULL else ExitCode.USAGE,
    )
