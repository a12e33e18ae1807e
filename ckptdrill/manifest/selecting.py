"""Finds the checkpoint to restore below a folder: the newest one that is committed and valid.

First every manifest below is read, then they are put in order: by completed step, then by the time
of the durable commit. They are verified from the newest on until one holds; the older ones are left
unread. Neither a name nor a `latest` pointer has a say. Pointers are looked at only to report
whether what they name is what was chosen.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ckptdrill import formats
from ckptdrill.errors import UserError
from ckptdrill.manifest import sidecar
from ckptdrill.manifest.files import open_inside
from ckptdrill.manifest.record import Problem, ProblemError, ProblemKind, Status, printable
from ckptdrill.manifest.times import ns_of_utc
from ckptdrill.manifest.verifying import Sample, check

POINTER_NAME = "latest"
# What frameworks write beside their checkpoints to name the newest: DeepSpeed and its universal
# form, Megatron (an iteration, also ByteCheckpoint), and many scripts (a symbolic link).
_MEGATRON_POINTER = "latest_checkpointed_iteration.txt"
_POINTER_NAMES = (POINTER_NAME, "latest_universal", _MEGATRON_POINTER)
_MAX_POINTER_BYTES = 4096


class Standing(StrEnum):
    """What became of one generation; a closed list."""

    CHOSEN = "chosen"
    OLDER = "older"
    NOT_COMMITTED = "not-committed"
    INVALID = "invalid"
    NO_MANIFEST = "no-manifest"


class Pointing(StrEnum):
    """What a pointer says, compared with what was chosen; a closed list."""

    RIGHT = "right"
    OTHER_GENERATION = "other-generation"
    NOTHING_THERE = "nothing-there"
    LEADS_OUT = "leads-out"
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Generation:
    """One checkpoint below the folder, with what its manifest says of its age, if it has one.

    `problems` are why it was passed over, where its age is not the reason.
    """

    path: Path
    standing: Standing
    problems: tuple[Problem, ...] = ()
    completed_step: int | None = None
    durable_commit_time_utc: str | None = None

    @property
    def why(self) -> str:
        """One line: why this one, or why not."""
        if self.standing is Standing.CHOSEN:
            return "the newest that is committed and valid"
        if self.standing is Standing.OLDER:
            return "older than the chosen one; its content was not read"
        more = f" and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
        return f"{self.problems[0]}{more}"


@dataclass(frozen=True)
class Pointer:
    """A file or link that claims to name the newest checkpoint, and what it names."""

    path: Path
    names: str
    pointing: Pointing


@dataclass(frozen=True)
class Selection:
    """The outcome; `generations` newest first, those without a readable manifest last."""

    chosen: Generation | None
    generations: tuple[Generation, ...]
    pointers: tuple[Pointer, ...]


def select(root: Path, *, sample: Sample | None = None, workers: int | None = None) -> Selection:
    """The newest valid committed checkpoint below `root`, and why each other one was passed over.

    A candidate is read in full, or as far as `sample` says. Links are not followed. Raises
    UserError when `root` is no folder.
    """
    if not root.is_dir():
        raise UserError(f"no folder at {root}", hint="name the folder that holds the checkpoints")
    root = root.resolve()
    found = [_seen(path) for path in _candidates(root)]
    judged: list[Generation] = []
    chosen = None
    for each in sorted(found, key=_age, reverse=True):
        judged.append(each if chosen else _judged(each, sample, workers))
        if judged[-1].standing is Standing.CHOSEN:
            chosen = judged[-1]
    folders = {root, *(each.path.parent for each in judged if each.path != root)}
    pointers = [p for folder in sorted(folders) for p in _pointers(folder, root, chosen)]
    return Selection(chosen, tuple(judged), tuple(pointers))


def _seen(path: Path) -> Generation:
    """A generation as its manifest presents it: OLDER stands for whatever may still be chosen."""
    try:
        manifest = sidecar.read(sidecar.path_of(path))
    except ProblemError as error:
        missing = error.problem.kind is ProblemKind.MANIFEST_MISSING
        standing = Standing.NO_MANIFEST if missing else Standing.INVALID
        return Generation(path, standing, (error.problem,))
    step, time = manifest.completed_step, manifest.storage.durable_commit_time_utc
    if manifest.status is Status.COMMITTED:
        return Generation(path, Standing.OLDER, (), step, time)
    what = Problem(ProblemKind.NOT_COMMITTED, "", "publishing it has not finished")
    return Generation(path, Standing.NOT_COMMITTED, (what,), step, time)


def _age(generation: Generation) -> tuple[int, int, int, str]:
    """Sorts by step, then by commit time; what has neither comes first, names only break ties."""
    step, time = generation.completed_step, ns_of_utc(generation.durable_commit_time_utc)
    known = generation.standing not in (Standing.NO_MANIFEST, Standing.INVALID)
    return (
        known,
        -1 if step is None else step,
        -1 if time is None else time,
        generation.path.as_posix(),
    )


def _judged(each: Generation, sample: Sample | None, workers: int | None) -> Generation:
    """The same generation, chosen if its content holds."""
    if each.standing is not Standing.OLDER:
        return each
    try:
        problems = check(each.path, sample=sample, workers=workers).problems
    except UserError as error:  # it went away while the others were read
        problems = (Problem(ProblemKind.MISSING, "", error.what),)
    standing = Standing.INVALID if problems else Standing.CHOSEN
    return dataclasses.replace(each, standing=standing, problems=problems)


# --------------------------------------------------------------------------------------------------
# Looking around


def _candidates(root: Path) -> Iterator[Path]:
    """Every folder and file below `root` that has a manifest, and whatever else looks like a
    checkpoint: a folder at the top with files but no manifest in it, a file of a known format.
    """
    if (root / sidecar.FOLDER_NAME).exists():
        yield root
        return
    for path in sorted(_entries(root)):
        if stat.S_ISDIR(_mode(path)):
            below = list(_with_manifest(path))
            yield from below or ([path] if _holds_a_file(path) else ())
        elif stat.S_ISREG(_mode(path)) and _is_checkpoint_file(path):
            yield path


def _with_manifest(folder: Path) -> Iterator[Path]:
    """The folders and files from `folder` down that have a manifest; not what lies inside them."""
    for here, folders, names in os.walk(folder):
        if sidecar.FOLDER_NAME in names:
            folders.clear()
            yield Path(here)
            continue
        folders.sort()
        present = set(names)
        for name in sorted(names):
            if f"{name}{sidecar.SUFFIX}" in present and not (Path(here) / name).is_symlink():
                yield Path(here) / name


def _holds_a_file(folder: Path) -> bool:
    return any(names for _, _, names in os.walk(folder))


def _is_checkpoint_file(path: Path) -> bool:
    if path.name.endswith(sidecar.SUFFIX) or path.name in _POINTER_NAMES:
        return False
    return sidecar.path_of(path).exists() or formats.recognise(path) is not None


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


# --------------------------------------------------------------------------------------------------
# Pointers


def pointer_text(pointer: Path) -> str:
    """What a pointer says: the target of a link, or the text of a small file.

    Raises OSError, UnicodeDecodeError or ProblemError for anything else.
    """
    if pointer.is_symlink():
        return str(pointer.readlink())
    with os.fdopen(open_inside(pointer.parent, pointer.name), "rb") as stream:
        return stream.read(_MAX_POINTER_BYTES).decode().strip()


def _pointers(folder: Path, root: Path, chosen: Generation | None) -> Iterator[Pointer]:
    for name in _POINTER_NAMES:
        path = folder / name
        if stat.S_ISLNK(_mode(path)) or stat.S_ISREG(_mode(path)):
            try:
                yield _pointer(path, pointer_text(path), root, chosen)
            except (OSError, ProblemError, UnicodeDecodeError):
                yield Pointer(path, "", Pointing.UNREADABLE)


def _pointer(path: Path, text: str, root: Path, chosen: Generation | None) -> Pointer:
    name = text
    if path.name == _MEGATRON_POINTER and re.fullmatch(r"[0-9]{1,18}", text):
        name = _of_iteration(path.parent, int(text))
    target = Path(os.path.normpath(path.parent / name)) if "\0" not in name else path.parent
    pointing = Pointing.OTHER_GENERATION
    if not target.is_relative_to(root) or target == path.parent:
        pointing = Pointing.LEADS_OUT
    elif chosen is not None and target == chosen.path:
        pointing = Pointing.RIGHT
    elif not _mode(target):
        pointing = Pointing.NOTHING_THERE
    return Pointer(path, printable(text), pointing)


def _of_iteration(folder: Path, number: int) -> str:
    """Megatron's folder of an iteration, else ByteCheckpoint's."""
    megatron = f"iter_{number:07d}"
    return megatron if _mode(folder / megatron) else f"global_step_{number}"
