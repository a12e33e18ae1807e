"""Recognises checkpoints by their content and lists their tensors, without executing any of it.

A checkpoint is one file or a folder of parts, as jobs write them: a DCP folder, files of
torch.save or of safetensors, or several beside each other. First the parts are found, then each is
read by its own format, and their tensors are laid side by side with files relative to the
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ckptdrill.errors import UserError
from ckptdrill.formats import contents, dcp, roles, safetensors, torch_save
from ckptdrill.formats.contents import DCP, SAFETENSORS
from ckptdrill.formats.layout import Chunk, StoredFile, TensorMeta


def recognise(path: Path) -> str | None:
    """`dcp`, `torch.save`, `safetensors` or None; of a folder, `dcp` if one of its parts is, else
    that of its first.
    """
    found = [form for form, _ in parts(path)]
    return DCP if DCP in found else next(iter(found), None)


def parts(path: Path) -> list[tuple[str, Path]]:
    """(format, folder or file) of everything in it that is a checkpoint by itself, sorted.

    Links are not followed.
    """
    if path.is_file():
        form = contents.form_of(path)
        return [(form, path)] if form else []
    found: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(path):
        folders.sort()
        here = Path(folder)
        if (here / dcp.METADATA_NAME).is_file():
            found.append((DCP, here))
        files = [here / name for name in sorted(names) if not (here / name).is_symlink()]
        found += [(form, file) for file in files if (form := contents.form_of(file))]
    return found


def files(checkpoint: Path) -> tuple[StoredFile, ...]:
    """Every file of a checkpoint with its role (data, metadata, marker, pointer) and its rank.

    Sorted by path, links left out. Raises UserError when the folder cannot be listed.
    """
    return roles.files(checkpoint)


def tensors(path: Path) -> Mapping[str, TensorMeta]:
    """The tensors of a checkpoint by key; chunk files are relative to `path` (its name for a file).

    Where two parts have the same key, the later one is listed as `file:key`. In a folder, a part
    that cannot be read is passed over as long as another can. Raises UserError when none can.
    """
    listed: dict[str, TensorMeta] = {}
    refusals: list[UserError] = []
    found = parts(path)
    for form, part in found:
        try:
            for key, tensor in _read(form, part, path).items():
                listed[f"{part.relative_to(path).as_posix()}:{key}" if key in listed else key] = (
                    tensor
                )
        except UserError as error:
            refusals.append(error)
    if refusals and len(refusals) == len(found):
        raise refusals[0]
    if not found:
        raise UserError("not a checkpoint of a known format", where=str(path))
    return listed


def payload(path: Path, chunk: Chunk) -> tuple[Path, int, int]:
    """(file, first byte, size in bytes) of the raw elements of a chunk that `tensors` listed.

    Raises UserError when the bytes are not there.
    """
    root = path.parent if path.is_file() else path
    file = dcp.inside(root, chunk.file)
    if chunk.zipped:
        return dcp.payload(root, chunk)
    return file, chunk.offset_bytes, chunk.length_bytes


def _read(form: str, part: Path, checkpoint: Path) -> Mapping[str, TensorMeta]:
    if form == DCP:
        return contents.moved(dcp.read(part).tensors, part, checkpoint)
    root = part.parent if part == checkpoint else checkpoint
    found = safetensors.read(part).tensors if form == SAFETENSORS else torch_save.read(part)
    return contents.moved(found, part.parent, root)
