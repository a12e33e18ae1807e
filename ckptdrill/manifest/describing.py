"""Makes the manifest of a checkpoint: what its files say, and what its owner adds.

First everything in it is listed, and what no manifest can vouch for is refused: a save that never
finished, a pipe, a link that leads out. Then its tensors are read by their format without executing
anything, all files are hashed, and the listing is compared with a second one: a checkpoint that was
written to meanwhile has no manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from ckptdrill import formats
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.formats import dcp
from ckptdrill.formats.layout import TensorMeta
from ckptdrill.manifest import sidecar
from ckptdrill.manifest.files import (
    Listing,
    base,
    fsync_all,
    link_escapes,
    listing,
)
from ckptdrill.manifest.hashing import Digest, digests
from ckptdrill.manifest.markers import marker_of, unfinished
from ckptdrill.manifest.record import (
    CommitMarker,
    Facts,
    FileRecord,
    LinkRecord,
    Manifest,
    ProblemError,
    Status,
    printable,
    unknown_fields,
)
from ckptdrill.manifest.times import utc, utc_of_ns

# Hugging Face's log history grows with the run; what is looked for stands in files of megabytes.
_MAX_TRAINER_STATE_BYTES = 64 << 20


def describe(
    checkpoint: Path,
    facts: Facts | None = None,
    *,
    status: Status = Status.COMMITTED,
    workers: int | None = None,
) -> Manifest:
    """The manifest of `checkpoint` (a folder or one file), which is only read.

    `facts` are what the files cannot tell; `workers` files are hashed at a time, default one per
    core. Nothing is written: `commit` and `write` do that. Raises UserError (exit code 1) when the
    checkpoint was never committed by its writer, lacks a file that its own index names, holds
    something that is no file, or is being written to. With `status` in progress it may have the
    name of one in progress.
    """
    checkpoint = existing(checkpoint)
    found = _described(checkpoint, staged=status is Status.IN_PROGRESS)
    form, listed = formats.recognise(checkpoint), tensors_of(checkpoint)
    _refuse_gaps(checkpoint, found, listed or {})
    hashed = _hashed(checkpoint, found, workers)
    _refuse_changed(checkpoint, found)
    marker = marker_of(found.files) if checkpoint.is_dir() else None
    owned = _with_counters(facts or Facts(), checkpoint)
    files = tuple(
        FileRecord(path=path, bytes=hashed[path].stamp.size_bytes, sha256=hashed[path].sha256)
        for path in sorted(found.files)
    )
    manifest = Manifest(
        **{name: getattr(owned, name) for name in Facts.model_fields},
        status=status,
        format=form,
        commit_marker=None if marker is None else _marker(marker, hashed[marker]),
        state_keys_sha256=None if listed is None else keys_digest(listed),
        shapes_sha256=None if listed is None else shapes_digest(listed),
        files=files,
        links=tuple(LinkRecord(path=p, target=t) for p, t in sorted(found.links.items())),
    )
    return finished(manifest)


def finished(manifest: Manifest) -> Manifest:
    """`manifest` with its identifier and the names of its gaps filled in.

    An identifier that was not given is that of the content: `sha256:` and the digest of the lines
    that `sha256sum` would print for the files.
    """
    identifier = manifest.checkpoint_id or _identifier(manifest.files)
    filled = manifest.model_copy(update={"checkpoint_id": identifier})
    return filled.model_copy(update={"unknown": unknown_fields(filled)})


def commit(checkpoint: Path, manifest: Manifest) -> Manifest:
    """Make every file of `checkpoint` durable, and then the manifest that says so; returns it.

    Its status becomes committed, its `storage.durable_commit_time_utc` the time after the last
    fsync of data. Raises UserError when something cannot be made durable.
    """
    checkpoint = existing(checkpoint)
    try:
        fsync_all(checkpoint, listing(checkpoint))
    except OSError as error:
        what = f"cannot make it durable: {error.strerror or error}"
        raise UserError(what, where=str(checkpoint), hint="look at the storage") from error
    except ProblemError as error:
        raise _invalid(str(error.problem), checkpoint, "something writes there") from error
    durable = {"durable_commit_time_utc": utc(datetime.now(UTC))}
    storage = manifest.storage.model_copy(update=durable)
    update = {"storage": storage, "status": Status.COMMITTED}
    committed = finished(manifest.model_copy(update=update))
    sidecar.write(sidecar.path_of(checkpoint), committed)
    return committed


def existing(checkpoint: Path) -> Path:
    """The real path of a checkpoint that somebody named.

    Raises UserError when there is nothing, or neither a folder nor a regular file.
    """
    try:
        path = checkpoint.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"no checkpoint at {checkpoint}", hint="name a folder or a file") from error
    if not path.is_dir() and not path.is_file():
        raise UserError(f"{checkpoint} is neither a folder nor a regular file")
    return path


# --------------------------------------------------------------------------------------------------
# What is refused


def _invalid(what: str, checkpoint: Path, hint: str) -> UserError:
    return UserError(what, where=str(checkpoint), hint=hint, code=ExitCode.UNSUPPORTED)


def _described(checkpoint: Path, *, staged: bool) -> Listing:
    """The listing of a checkpoint that a manifest can describe, without the manifest itself."""
    found = sidecar.without_manifest(checkpoint, listing(checkpoint))
    why = unfinished("" if staged else checkpoint.name, found.files)
    if why is not None:
        raise _invalid(why, checkpoint, "wait for its writer, or save again: it is no checkpoint")
    if found.others:
        what = f"{printable(found.others[0])} is neither a file nor a folder"
        raise _invalid(what, checkpoint, "remove it; a manifest cannot vouch for it")
    for path, target in sorted(found.links.items()):
        if link_escapes(path, target):
            what = f"the link {printable(path)} leads out of the checkpoint"
            raise _invalid(what, checkpoint, "copy the checkpoint as a whole: cp -rL")
    for folder, reason in sorted(found.unreadable.items()):
        raise _invalid(f"cannot list {printable(folder)}: {reason}", checkpoint, "read it as owner")
    for path in (*found.files, *found.links):
        _refuse_unprintable(path, checkpoint)
    depth_2 = (Path(path).parts for path in found.files if Path(path).name == sidecar.FOLDER_NAME)
    generations = {parts[0] for parts in depth_2 if len(parts) == 2}
    if len(generations) > 1:
        what = f"{len(generations)} checkpoints with manifests of their own are in it"
        raise _invalid(what, checkpoint, "name the folder of one of them")
    if not found.files:
        raise _invalid("there is no file in it", checkpoint, "name the folder of one checkpoint")
    return found


def _refuse_unprintable(path: str, checkpoint: Path) -> None:
    if not path.isprintable():
        what = f"the name {printable(path)} cannot be written down"
        raise _invalid(what, checkpoint, "rename it: UTF-8, no control characters")


def _refuse_gaps(checkpoint: Path, found: Listing, tensors: Mapping[str, TensorMeta]) -> None:
    """Every file that the checkpoint's own index names is there, and long enough."""
    for path in _indexed(checkpoint, found):
        if path not in found.files and path not in found.links:
            what = f"{printable(path)} is missing: the checkpoint's own index names it"
            raise _invalid(what, checkpoint, "save again: this one is not whole")
    for key, tensor in tensors.items():
        for chunk in tensor.chunks:
            stamp = found.files.get(chunk.file)
            end = chunk.offset_bytes + chunk.length_bytes
            if stamp is not None and stamp.size_bytes < end:
                what = f"{chunk.file} ends before {printable(key)}, which reaches to byte {end}"
                raise _invalid(what, checkpoint, "save again: this one is not whole")


def _indexed(checkpoint: Path, found: Listing) -> Iterable[str]:
    """The files that the indexes of DCP in a folder name, relative to the checkpoint."""
    for path in found.files:
        part = PurePosixPath(path)
        if part.name == dcp.METADATA_NAME and checkpoint.is_dir():
            yield from (
                (part.parent / file).as_posix() for file in _named_by(checkpoint / part.parent)
            )


def _named_by(folder: Path) -> tuple[str, ...]:
    try:
        return dcp.read(folder).files
    except UserError:  # unreadable, hostile or of another tool: it tells nothing
        return ()


def _hashed(checkpoint: Path, found: Listing, workers: int | None) -> dict[str, Digest]:
    sizes = {path: stamp.size_bytes for path, stamp in found.files.items()}
    hashed: dict[str, Digest] = {}
    for path, result in digests(base(checkpoint), sizes, workers=workers).items():
        if not isinstance(result, Digest):
            raise _invalid(str(result), checkpoint, "run it again once nothing writes there")
        hashed[path] = result
    return hashed


def _refuse_changed(checkpoint: Path, before: Listing) -> None:
    after = sidecar.without_manifest(checkpoint, listing(checkpoint))
    changed = {path for path, _ in before.files.items() ^ after.files.items()}
    changed |= {path for path, _ in set(before.links.items()) ^ set(after.links.items())}
    if changed:
        what = f"{printable(min(changed))} changed while the checkpoint was hashed"
        raise _invalid(what, checkpoint, "run it again once nothing writes there")


# --------------------------------------------------------------------------------------------------
# What the files tell


def _marker(path: str, hashed: Digest) -> CommitMarker:
    time = utc_of_ns(hashed.stamp.modified_ns)
    return CommitMarker(file=path, sha256=hashed.sha256, modified_time_utc=time)


def keys_digest(listed: Mapping[str, TensorMeta]) -> str:
    """What `state_keys_sha256` records of tensors by key."""
    return _sha256(sorted(listed))


def shapes_digest(listed: Mapping[str, TensorMeta]) -> str:
    """What `shapes_sha256` records of tensors by key."""
    return _sha256(_shape_lines(listed))


def step_of(checkpoint: Path) -> int | None:
    """The step that Hugging Face's Trainer wrote beside its tensors."""
    step = _trainer_state(checkpoint / "trainer_state.json").get("global_step")
    return step if type(step) is int and step >= 0 else None


def tensors_of(checkpoint: Path) -> Mapping[str, TensorMeta] | None:
    """The tensors by key, None where they cannot be read without executing something."""
    try:
        return formats.tensors(checkpoint)
    except UserError:
        return None


def _shape_lines(listed: Mapping[str, TensorMeta]) -> Iterable[str]:
    for key in sorted(listed):
        tensor = listed[key]
        yield f"{key}\t{tensor.dtype}\t{'x'.join(map(str, tensor.shape))}"


def _sha256(lines: Iterable[str]) -> str:
    return hashlib.sha256(
        "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    ).hexdigest()


def _identifier(files: Iterable[FileRecord]) -> str:
    return f"sha256:{_sha256(f'{file.sha256}  {file.path}' for file in files)}"


def _with_counters(facts: Facts, checkpoint: Path) -> Facts:
    """`facts` with the step and the epoch that Hugging Face's Trainer wrote beside its tensors.

    Raises UserError when the owner names another step.
    """
    recorded = _trainer_state(checkpoint / "trainer_state.json")
    step, epoch = recorded.get("global_step"), recorded.get("epoch", math.nan)
    if type(step) is not int or step < 0:
        return facts
    if facts.completed_step not in (None, step):
        what = f"step {facts.completed_step} was given, trainer_state.json says {step}"
        raise UserError(what, where=str(checkpoint), hint="leave the step out, or mend it")
    counters = facts.training_state
    known = isinstance(epoch, int | float) and 0 <= epoch < math.inf
    if counters.epoch is None and known:
        counters = counters.model_copy(update={"epoch": float(epoch)})
    return facts.model_copy(update={"completed_step": step, "training_state": counters})


def _trainer_state(path: Path) -> dict[str, Any]:
    """What stands in it; nothing if it is missing, no object, or no plain file of that size."""
    try:
        if path.is_symlink() or not path.is_file():
            return {}
        if path.stat().st_size > _MAX_TRAINER_STATE_BYTES:
            return {}
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
