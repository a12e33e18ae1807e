"""Whether the files of a packet are those that its list of checksums names.

It needs no job, no torch and nothing but the folder: `sha256sum -c manifest-sha256.txt` there does
the same, except that only this one also finds files that were added. The list is read as a stranger
may have written it: a path that leaves the folder, also through a symbolic link, is never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ckptdrill import signing
from ckptdrill.packet.attestation import PAYLOAD_TYPE
from ckptdrill.store import (
    ATTESTATION_NAME,
    MANIFEST_NAME,
    SEAL_NAME,
    SEALED,
    evidence_files,
    sha256_of,
)

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


class ProblemKind(StrEnum):
    """What can be wrong with one file or one line; a closed list."""

    NO_LIST = "no list"
    MALFORMED = "malformed line"
    OUTSIDE = "outside the folder"
    MISSING = "missing"
    DIFFERS = "differs"
    EXTRA = "extra"
    SIGNATURE = "signature"


@dataclass(frozen=True)
class Problem:
    """One finding. `path` is as the list writes it, or relative to the folder."""

    kind: ProblemKind
    path: str
    explanation: str

    def __str__(self) -> str:
        """One line for a terminal."""
        return f"{self.kind}: {self.path}: {self.explanation}"


def verify(root: Path, trusted: str | None = None) -> list[Problem]:
    """Compare `root` with its list; an empty result means that every file is the recorded one.

    Problems come in the order of the list, files that it does not name last, then what was made
    over the list. With `trusted`, a public key in hex, the attestation must be signed by it:
    without a key that is known beforehand, whoever rewrites a folder can also make new lists.
    """
    try:
        lines = (root / MANIFEST_NAME).read_bytes().decode().split("\n")
    except FileNotFoundError:
        return [Problem(ProblemKind.NO_LIST, MANIFEST_NAME, "the folder has no list of checksums")]
    except (OSError, UnicodeDecodeError) as error:
        return [Problem(ProblemKind.NO_LIST, MANIFEST_NAME, f"cannot be read: {error}")]
    problems, listed = _check_list(root, MANIFEST_NAME, lines)
    problems += [*_extra_files(root, listed), *_check_seal(root)]
    return problems + list(_check_attestation(root, trusted))


def _check_list(
    root: Path, list_name: str, lines: list[str]
) -> tuple[list[Problem], dict[str, str]]:
    """What is wrong with the lines of a list or with the files that it names, and those files."""
    problems: list[Problem] = []
    listed: dict[str, str] = {}
    for line_number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        problems += _read_line(f"{list_name}:{line_number}", line, listed)
    for name, digest in listed.items():
        problems += _check_file(root, name, digest)
    return problems, listed


def _check_seal(root: Path) -> Iterator[Problem]:
    """The second list, of what was made over the first. A run that never ended has none."""
    there = [name for name in SEALED if (root / name).exists() or (root / name).is_symlink()]
    try:
        lines = (root / SEAL_NAME).read_bytes().decode().split("\n")
    except FileNotFoundError:
        if there != [MANIFEST_NAME]:
            yield Problem(ProblemKind.NO_LIST, SEAL_NAME, f"{there[-1]} is there, its list is not")
        return
    except (OSError, UnicodeDecodeError) as error:
        yield Problem(ProblemKind.NO_LIST, SEAL_NAME, f"cannot be read: {error}")
        return
    problems, listed = _check_list(root, SEAL_NAME, lines)
    yield from problems
    for name in there:
        if name not in listed:
            yield Problem(ProblemKind.EXTRA, name, f"in the folder, not in {SEAL_NAME}")


def _check_attestation(root: Path, trusted: str | None) -> Iterator[Problem]:
    """Its signature, if it has one or has to have one, and that it speaks of this list."""
    path = root / ATTESTATION_NAME
    if not path.is_file() or path.is_symlink():
        if trusted is not None:
            yield Problem(ProblemKind.SIGNATURE, ATTESTATION_NAME, "there is no attestation")
        return
    try:
        value = json.loads(path.read_bytes())
        signed = signing.opened(value, PAYLOAD_TYPE) if signing.is_envelope(value) else None
        statement = json.loads(signed.payload) if signed else value
        attested = {
            each["name"]: each["digest"]["sha256"]
            for each in statement["predicate"]["configuration"]
        }
    except signing.SignatureError as error:
        yield Problem(ProblemKind.SIGNATURE, ATTESTATION_NAME, str(error))
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        yield Problem(ProblemKind.MALFORMED, ATTESTATION_NAME, "this is no attestation of a packet")
        return
    if attested.get(MANIFEST_NAME) != _digest(root / MANIFEST_NAME):
        explanation = f"it speaks of another {MANIFEST_NAME}"
        yield Problem(ProblemKind.DIFFERS, ATTESTATION_NAME, explanation)
    if trusted is not None and (signed is None or signed.key != trusted):
        explanation = f"signed by {signed.key}" if signed else "not signed"
        yield Problem(ProblemKind.SIGNATURE, ATTESTATION_NAME, f"{explanation}, not by {trusted}")


def _read_line(where: str, line: str, listed: dict[str, str]) -> Iterator[Problem]:
    """Add what the line says to `listed`."""
    found = _LINE.fullmatch(line)
    if found is None:
        yield Problem(ProblemKind.MALFORMED, where, "expected 64 hex digits, two spaces, a path")
    elif found[2] in listed:
        yield Problem(ProblemKind.MALFORMED, found[2], f"named again in {where}")
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
