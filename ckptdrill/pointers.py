"""Pointers to a checkpoint: `latest` and its like, copied, set to another step, and made to lie.

A job that finds its checkpoint itself follows a small file or a link that names one. First the
pointers of a folder are found; then they are copied with every name of a step replaced by that of
another one, because the run they come from has gone on since. A lie is told the same way, except
for those that no name is made of: bytes that mean nothing, nothing at all, or no pointer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.model import PointerLie

# As DeepSpeed (with latest_universal), Megatron (latest_checkpointed_iteration.txt), Lightning (a
# link last.ckpt) and scripts call theirs.
NAMES = ("latest*", "last*", "current*")
# A pointer names a step or a folder; anything larger is data.
_LARGEST_BYTES = 4096
_GARBAGE = b"\xff\xfe\x00\x9d\x00step-\x80\xc3\x28\n"


def found(folder: Path) -> tuple[Path, ...]:
    """The pointers at the top of `folder`, sorted: links, and files of at most 4096 bytes."""
    paths = {path for pattern in NAMES for path in folder.glob(pattern)}
    return tuple(sorted(path for path in paths if _is_pointer(path)))


def _is_pointer(path: Path) -> bool:
    return path.is_symlink() or (path.is_file() and path.stat().st_size <= _LARGEST_BYTES)


def text_of(pointer: Path) -> str:
    """What a pointer says: where the link leads, or the text of the file without blank ends."""
    if pointer.is_symlink():
        return str(pointer.readlink()).rstrip("/")
    return pointer.read_bytes().decode(errors="replace").strip()


def copy(
    source: Path,
    target: Path,
    folders: Iterable[str],
    texts: Mapping[str, str],
    roots: tuple[Path, Path],
) -> None:
    """Copy the pointers of `source` to the folder `target`, which is made.

    `folders` are the relative folders that may hold one. A pointer whose whole text is a key of
    `texts` gets its value; absolute paths below the first of `roots` are moved to the second.
    """
    target.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        for pointer in found(source / folder):
            (target / folder).mkdir(parents=True, exist_ok=True)
            said = text_of(pointer)
            new = texts.get(said, said).replace(str(roots[0]), str(roots[1]))
            _put(pointer, target / folder / pointer.name, said, new)


def _put(pointer: Path, target: Path, said: str, new: str) -> None:
    if pointer.is_symlink():
        target.symlink_to(new)
    elif new == said:
        shutil.copyfile(pointer, target)
    else:
        target.write_bytes(pointer.read_bytes().replace(said.encode(), new.encode()))


def lie(folder: Path, kind: PointerLie, texts: Mapping[str, str]) -> dict[str, Any]:
    """Make every pointer below `folder` lie; the record of it.

    `texts` maps what a pointer may say to what it shall say, for the lies that name a step. The
    record has `file` (the first pointer), `pointers` (path, text before and after), `files` (sizes
    in bytes and SHA-256, of a link those of its text) and `fired`. Raises UserError when there is
    no pointer.
    """
    pointers = sorted(_below(folder))
    if not pointers:
        raise UserError(
            f"the job keeps no pointer ({', '.join(NAMES)}) to its newest checkpoint, so none can "
            "lie: leave this drill out for it",
            where=str(folder),
        )
    names = [pointer.relative_to(folder).as_posix() for pointer in pointers]
    before = [_said(pointer) for pointer in pointers]
    for pointer in pointers:
        _tell(pointer, kind, texts)
    after = [_said(pointer) for pointer in pointers]
    told = list(zip(names, before, after, strict=True))
    return {
        "file": names[0],
        "tensor": None,
        "pointers": [{"path": n, "before": _shown(b), "after": _shown(a)} for n, b, a in told],
        "files": [_changed(*each) for each in told],
        "fired": before != after,
    }


def _below(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        yield from (Path(here, n) for n in (*names, *folders) if _is_pointer(Path(here, n)))


def _tell(pointer: Path, kind: PointerLie, texts: Mapping[str, str]) -> None:
    if kind is PointerLie.REMOVED:
        pointer.unlink()
    elif kind in {PointerLie.GARBAGE, PointerLie.EMPTY}:
        _say(pointer, _GARBAGE if kind is PointerLie.GARBAGE else b"")
    else:
        said = text_of(pointer)
        if said in texts:
            _say(pointer, _content(pointer).replace(said.encode(), texts[said].encode()))


def _say(pointer: Path, content: bytes) -> None:
    """Write `content`; a link cannot be empty, so that it leads to the folder it lies in."""
    if pointer.is_symlink():
        pointer.unlink()
        pointer.symlink_to(os.fsdecode(content.replace(b"\0", b"").strip() or b"."))
    else:
        pointer.write_bytes(content)


def _content(pointer: Path) -> bytes:
    return os.fsencode(pointer.readlink()) if pointer.is_symlink() else pointer.read_bytes()


def _said(pointer: Path) -> bytes | None:
    return _content(pointer) if os.path.lexists(pointer) else None


def _shown(content: bytes | None) -> str | None:
    return None if content is None else content.decode(errors="backslashreplace").strip()


def _changed(name: str, before: bytes | None, after: bytes | None) -> dict[str, Any]:
    return {
        "path": name,
        "size_bytes_before": None if before is None else len(before),
        "size_bytes_after": None if after is None else len(after),
        "sha256_before": None if before is None else hashlib.sha256(before).hexdigest(),
        "sha256_after": None if after is None else hashlib.sha256(after).hexdigest(),
    }
