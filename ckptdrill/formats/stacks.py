"""Finds the checkpoint at a path, recognises which stack wrote it, and says what it holds.

First the folder: a root of generations (`step-4`, `step-8`, `latest`) is no checkpoint; its only
generation is taken, or the one that its pointer names, and otherwise the user has to name one. Then
the stacks are asked in turn, those with the most particular signature first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from ckptdrill.errors import UserError
from ckptdrill.formats import (
    accelerate,
    bytecheckpoint,
    contents,
    dcp,
    deepspeed,
    hf_trainer,
    lightning,
    listing,
    megatron,
    names,
    orbax,
    plain,
    roles,
    torchtitan,
    universal,
)
from ckptdrill.formats.contents import Found, Holdings, Part
from ckptdrill.formats.kinds import Kind, Sort, sort
from ckptdrill.formats.layout import StoredFile, TensorMeta
from ckptdrill.formats.leaves import Leaf


class Stack(Protocol):
    """What the module of a stack has."""

    NAME: str
    COMMIT: str

    def recognises(self, found: Found) -> bool:
        """Whether this is a checkpoint of the stack, by its content."""

    def holdings(self, found: Found) -> Holdings:
        """What it holds. Only asked of what it recognises."""


_STACKS: tuple[Stack, ...] = (
    orbax,
    megatron,
    universal,
    hf_trainer,
    deepspeed,
    lightning,
    accelerate,
    bytecheckpoint,
    torchtitan,
)
_GENERATION = re.compile(r"(?P<stem>.*?)(?P<number>\d+)(?P<end>(_uni|_universal|\.ckpt)?)")
_INDEX = re.compile(r"[\w.-]+\.index\.json")
_NOT_WEIGHT_LIKE = ("int", "uint", "bool", "qint", "quint")


@dataclass(frozen=True)
class Tensor:
    """A tensor with the key it has after placing, what it is, and where it is stored."""

    key: str
    sort: Sort
    stored: TensorMeta


@dataclass(frozen=True)
class Checkpoint:
    """All that the files say. `root` is the folder that files of chunks are relative to.

    `leaves` are (key, what it is, value), sorted by key as `tensors` are. `commit` is the rule by
    which a checkpoint of this format is known to be whole. `problems` make it incomplete, `notes`
    do not.
    """

    path: Path
    root: Path
    form: str
    commit: str
    tensors: tuple[Tensor, ...]
    leaves: tuple[tuple[str, Sort, Leaf], ...]
    files: tuple[StoredFile, ...]
    size_bytes: int
    versions: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


UNKNOWN = "not a checkpoint of a known format"


def read(path: Path) -> Checkpoint:
    """Everything about the checkpoint at `path`, a file or a folder; no pickle is executed.

    Raises UserError when nothing is there, nothing is known, nothing could be read, or a root holds
    several generations and no pointer chooses one.
    """
    chosen, notes = _generation(path)
    found = contents.find(chosen)
    stack = next((stack for stack in _STACKS if stack.recognises(found)), None)
    if stack is None and not plain.recognises(found):
        raise UserError(
            UNKNOWN,
            where=str(path),
            hint="known are DCP, torch.save, safetensors, and the folders of "
            + ", ".join(each.NAME for each in _STACKS),
        )
    _refuse_unreadable(found)
    held = stack.holdings(found) if stack else plain.holdings(found)
    name = stack.NAME if stack else plain.name(found)
    commit = stack.COMMIT if stack else plain.COMMITS[name]
    held = held.also(problems=(*_of_indexes(found), *_in_progress(chosen)), notes=notes)
    return _checkpoint(chosen, found, name, commit, held)


def _checkpoint(path: Path, found: Found, name: str, commit: str, held: Holdings) -> Checkpoint:
    leaves = [
        (key, sort(key, weight_like=False), leaf) for key, leaf in sorted(held.leaves.items())
    ]
    tensors, notes = _named(held, [each for _, each, _ in leaves if each.kind is Kind.GROUPS])
    return Checkpoint(
        path=path,
        root=found.root,
        form=name,
        commit=commit,
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.key)),
        leaves=tuple(leaves),
        files=roles.files(path),
        size_bytes=sum(_size(found.root / name) for name in found.names),
        versions=tuple(sorted(held.versions.items())),
        problems=tuple(dict.fromkeys(held.problems)),
        notes=tuple(dict.fromkeys((*held.notes, *notes))),
    )


def _named(held: Holdings, groups: list[Sort]) -> tuple[list[Tensor], list[str]]:
    """The tensors, their moments by the name of the parameter where its index tells it."""
    tensors = [
        Tensor(key, sort(key, weight_like=_weight_like(tensor)), tensor)
        for key, tensor in held.tensors.items()
    ]
    known = names.resolved([(t.key, t.sort, t.stored) for t in tensors], groups)
    if not known:
        return tensors, []
    of_parameter = (Kind.MOMENT, Kind.PARAMETER_STEP, Kind.MASTER)
    renamed = [
        dataclasses.replace(t, sort=dataclasses.replace(t.sort, name=known[t.sort.name]))
        if t.sort.kind in of_parameter and t.sort.name in known
        else t
        for t in tensors
    ]
    return renamed, ["moments are stored by index: taken in the order of the weights, which fits"]


def _weight_like(tensor: TensorMeta) -> bool:
    return not tensor.dtype.startswith(_NOT_WEIGHT_LIKE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _refuse_unreadable(found: Found) -> None:
    """With nothing read at all there is nothing to say but why; except of a save without its end,
    which is a class of its own.
    """
    if any(_uncommitted(found, part) for part in found.parts):
        return
    if found.parts and all(part.refusal is not None for part in found.parts):
        first = found.parts[0]
        raise UserError(
            f"no part of the checkpoint could be read: {first.refusal}",
            where=str(found.root / first.path),
            hint="restore the file from another copy, or treat it as hostile",
        )


def _uncommitted(found: Found, part: Part) -> bool:
    """Shards of DCP whose metadata, which is written last, is not there."""
    metadata = (PurePosixPath(part.path) / dcp.METADATA_NAME).as_posix()
    return part.form == contents.DCP and metadata not in found.names


# --------------------------------------------------------------------------------------------------
# Which generation


def _generation(path: Path) -> tuple[Path, list[str]]:
    """The checkpoint in a root of generations, and why that one; the path itself if it is none."""
    folders = _generations(path)
    if not folders:
        return path, []
    pointed = _pointed(path)
    if pointed is not None and pointed[1] in folders:
        return path / pointed[1], [f"the pointer {pointed[0]} names {pointed[1]}"]
    if len(folders) == 1 and pointed is None:
        return path / folders[0], [f"the only generation here is {folders[0]}"]
    said = f", and {pointed[0]} names {pointed[1]!r}, which is not there" if pointed else ""
    raise UserError(
        f"{len(folders)} generations are here{said}",
        where=str(path),
        hint="name one of " + ", ".join(str(path / name) for name in folders[:8]),
    )


def _generations(path: Path) -> list[str]:
    """Folders that differ only in a number, when nothing beside them is part of a checkpoint."""
    if not path.is_dir() or any(contents.form_of(path / name) for name in listing.entries(path)):
        return []
    folders = [
        name
        for name in listing.entries(path)
        if (path / name).is_dir() and not (path / name).is_symlink()
    ]
    matches = [_GENERATION.fullmatch(name) for name in folders if roles.rank(name) is None]
    stems = {match["stem"] for match in matches if match}
    alone = not (path / dcp.METADATA_NAME).exists() and len(stems) == 1 and all(matches)
    return folders if alone and len(matches) == len(folders) else []


def _pointed(path: Path) -> tuple[str, str] | None:
    """(pointer, folder) by the first file that points to something."""
    for name in listing.entries(path):
        text = roles.pointer_text(path / name) if name.startswith("latest") else None
        if text is not None:
            return name, _folder_of(path, text)
    return None


def _folder_of(path: Path, text: str) -> str:
    if not text.isdecimal():
        return text
    ends = re.compile(rf"[A-Za-z_-]*0*{text}")
    return next((name for name in listing.entries(path) if ends.fullmatch(name)), text)


# --------------------------------------------------------------------------------------------------
# What is wrong whatever the stack


def _of_indexes(found: Found) -> Iterator[str]:
    """Files that an index of safetensors or torch.save shards names and that are not there."""
    for name in found.names:
        folder, _, file = name.rpartition("/")
        index = found.json(name) if _INDEX.fullmatch(file) else None
        weights = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weights, dict):
            continue
        for needed in sorted({text for text in weights.values() if isinstance(text, str)}):
            dcp.inside(found.root / folder, needed)
            if f"{folder}/{needed}".lstrip("/") not in found.names:
                yield f"{name} names {needed[:200]!r}, which is missing"


def _in_progress(path: Path) -> Iterable[str]:
    if re.search(r"\.(tmp|partial|inprogress)$|^tmp[-_.]", path.name):
        yield f"the name {path.name!r} says that its save has not ended"
