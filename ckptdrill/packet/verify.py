"""Whether the files of a packet are those that its list of checksums names.

It needs no job, no torch and nothing but the folder: `sha256sum -c manifest-sha256.txt` there does
the same, except that only this one also finds files that were added. The list is read as a stranger
may have written it: a path that leaves the folder, also through a symbolic link, is never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ckptdrill.store import MANIFEST_NAME, evidence_files, sha256_of

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


class ProblemKind(StrEnum):
    """What can be wrong with one file or one line; a closed list."""

    NO_LIST = "no list"
    MALFORMED = "malformed line"
    OUTSIDE = "outside the folder"
    MISSING = "missing"
    DIFFERS = "differs"
    EXTRA = "extra"


@dataclass(frozen=True)
class Problem:
    """One finding. `path` is as the list writes it, or relative to the folder."""

    kind: ProblemKind
    path: str
    explanation: str

    def __str__(self) -> str:
        """One line for a terminal."""
        return f"{self.kind}: {self.path}: {self.explanation}"


def verify(root: Path) -> list[Problem]:
    """Compare `root` with its list; an empty result means that every file is the recorded one.

    Problems come in the order of the list, files that it does not name last.
    """
    try:
        lines = (root / MANIFEST_NAME).read_bytes().decode().split("\n")
    except FileNotFoundError:
        return [Problem(ProblemKind.NO_LIST, MANIFEST_NAME, "the folder has no list of checksums")]
    except (OSError, UnicodeDecodeError) as error:
        return [Problem(ProblemKind.NO_LIST, MANIFEST_NAME, f"cannot be read: {error}")]
    problems: list[Problem] = []
    listed: dict[str, str] = {}
    for line_number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        problems += _read_line(line_number, line, listed)
    for name, digest in listed.items():
        problems += _check_file(root, name, digest)
    return problems + list(_extra_files(root, listed))


def _read_line(line_number: int, line: str, listed: dict[str, str]) -> Iterator[Problem]:
    """Add what the line says to `listed`."""
    found = _LINE.fullmatch(line)
    if found is None:
        where = f"{MANIFEST_NAME}:{line_number}"
        yield Problem(ProblemKind.MALFORMED, where, "expected 64 hex digits, two spaces, a path")
    elif found[2] in listed:
        yield Problem(ProblemKind.MALFORMED, found[2], f"named again in line {line_number}")
    else:
        listed[found[2]] = found[1]


def _check_file(root: Path, name: str, digest: str) -> Iterator[Problem]:
    path = root / name
    if not _is_inside(root, name):
        yield Problem(ProblemKind.OUTSIDE, name, "the path leaves the folder; it was not opened")
    elif not path.is_file():
        yield Problem(ProblemKind.MISSING, name, "named in the list, not in the folder")
    elif (found := _digest(path)) != digest:
        yield Problem(ProblemKind.DIFFERS, name, f"recorded {digest}, found {found}")


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"no readable file ({error.strerror})"


def _is_inside(root: Path, name: str) -> bool:
    """True for a plain relative path of which no part is a way out of `root`."""
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        return False
    return not any((root / part).is_symlink() for part in (relative, *relative.parents[:-1]))


def _extra_files(root: Path, listed: dict[str, str]) -> Iterator[Problem]:
    for path in evidence_files(root):
        name = path.relative_to(root).as_posix()
        if name not in listed:
            yield Problem(ProblemKind.EXTRA, name, "in the folder, not in the list")
