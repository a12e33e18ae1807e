"""Lists the files of a checkpoint folder once, within bounds, and never through a link.

A link could lead out of the folder, a pipe would make an opener wait for ever, and a folder could
hold millions of files: what is listed here is regular files, at most 200,000 of them.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptdrill.errors import UserError

MAX_FILES = 200_000


def names(folder: Path) -> tuple[str, ...]:
    """The regular files below `folder`, sorted, as paths relative to it; links are passed over.

    Raises UserError when there is no such folder or it holds over `MAX_FILES` files.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError("neither a file nor a folder", where=str(folder))
    if not folder.is_dir():
        raise UserError("no such file or folder", where=str(folder))
    found: list[str] = []
    for here, folders, files in os.walk(folder):
        folders.sort()
        inner = Path(here).relative_to(folder)
        found += [(inner / name).as_posix() for name in files if _regular(Path(here) / name)]
        if len(found) > MAX_FILES:
            raise UserError(f"the folder holds over {MAX_FILES} files", where=str(folder))
    return tuple(sorted(found))


def head(path: Path, size_bytes: int) -> bytes:
    """The first bytes of a regular file; nothing of anything else, or of what cannot be read."""
    if not _regular(path):
        return b""
    try:
        with path.open("rb") as stream:
            return stream.read(size_bytes)
    except OSError:
        return b""


def entries(folder: Path) -> tuple[str, ...]:
    """The names directly in `folder`, sorted; none when it cannot be listed."""
    try:
        return tuple(sorted(path.name for path in folder.iterdir()))
    except OSError:
        return ()


def _regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
