"""Compares a checkpoint with its manifest and names everything that is not as recorded.

First what costs nothing: names, sizes, links. Then the files whose size is right are hashed, all of
them or a sample. A sample is drawn by a seed and says what it left out; sizes and the commit marker
are never left out. Nothing that the manifest names is opened outside the checkpoint, and a file
without a recorded checksum is a finding, not a success.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptdrill import formats
from ckptdrill.manifest import describing, sidecar
from ckptdrill.manifest.describing import existing
from ckptdrill.manifest.files import (
    Listing,
    base,
    escapes,
    link_escapes,
    listing,
)
from ckptdrill.manifest.hashing import Digest, digests
from ckptdrill.manifest.record import (
    CommitMarker,
    FileRecord,
    Manifest,
    Problem,
    ProblemError,
    ProblemKind,
    Status,
)
from ckptdrill.manifest.times import ns_of_utc, utc_of_ns


@dataclass(frozen=True)
class Sample:
    """A share of the bytes to hash, 0 to 1, drawn by `seed`: the same seed, the same files."""

    share: float
    seed: str = ""


@dataclass(frozen=True)
class Audit:
    """What a comparison found, and how much of the checkpoint it read.

    `hashed` are the files whose content was read, `unread` those of which only the size was
    compared; both by path, with their recorded sizes in bytes.
    """

    problems: tuple[Problem, ...]
    hashed: Mapping[str, int]
    unread: Mapping[str, int]

    @property
    def ok(self) -> bool:
        """Whether nothing was found. Beside a sample this says nothing of the rest."""
        return not self.problems


def verify(
    checkpoint: Path, manifest: Manifest, *, workers: int | None = None
) -> tuple[Problem, ...]:
    """Everything in which `checkpoint` differs from `manifest`, all content read.

    `manifest` may be of another place: modification times are not compared. A checkpoint of one
    file may have another name than the recorded one.
    """
    return audit(checkpoint, manifest, workers=workers).problems


def check(checkpoint: Path, *, sample: Sample | None = None, workers: int | None = None) -> Audit:
    """`audit` of a checkpoint with the manifest that lies with it; without a usable one the only
    problem is that.
    """
    checkpoint = existing(checkpoint)
    path = sidecar.path_of(checkpoint)
    try:
        manifest = sidecar.read(path)
    except ProblemError as invalid:
        return Audit((invalid.problem,), {}, {})
    kept = sidecar.times_kept(path, manifest)
    return audit(checkpoint, manifest, sample=sample, times_kept=kept, workers=workers)


def audit(
    checkpoint: Path,
    manifest: Manifest,
    *,
    sample: Sample | None = None,
    times_kept: bool = False,
    workers: int | None = None,
) -> Audit:
    """Compare `checkpoint` with `manifest`, reading a `sample` of the content or all of it.

    `times_kept` tells that the modification times are those of the writer, not of a copy: then the
    time of the commit marker is compared too. At most one mebibyte per worker is held of the
    content. Problems come sorted by kind, then path.
    """
    checkpoint = existing(checkpoint)
    manifest = _for_this(checkpoint, manifest)
    found = sidecar.without_manifest(checkpoint, listing(checkpoint))
    problems = [*_of_status(manifest), *_of_names(manifest, found)]
    readable = {
        record.path: record
        for record in manifest.files
        if record.path in found.files
        and found.files[record.path].size_bytes == record.size_bytes
        and not escapes(record.path)
    }
    chosen = _chosen(readable, manifest.commit_marker, sample)
    results = digests(base(checkpoint), chosen, workers=workers)
    problems += _of_content(readable, results)
    if manifest.commit_marker is not None:
        problems += _of_marker(manifest.commit_marker, found, results, times_kept=times_kept)
    if not problems:
        problems += _of_state(checkpoint, manifest)
    unread = {path: record.size_bytes for path, record in readable.items() if path not in chosen}
    return Audit(tuple(sorted(problems, key=_rank)), chosen, unread)


def _rank(problem: Problem) -> tuple[int, str]:
    return list(ProblemKind).index(problem.kind), problem.path


def _for_this(checkpoint: Path, manifest: Manifest) -> Manifest:
    """The manifest of one file goes for a copy under whatever name."""
    if checkpoint.is_dir() or len(manifest.files) != 1 or "/" in manifest.files[0].path:
        return manifest
    renamed = manifest.files[0].model_copy(update={"path": checkpoint.name})
    return manifest.model_copy(update={"files": (renamed,)})


# --------------------------------------------------------------------------------------------------
# What costs nothing


def _of_status(manifest: Manifest) -> Iterator[Problem]:
    if manifest.status is not Status.COMMITTED:
        what = f"the status is {manifest.status}: publishing it has not finished"
        yield Problem(ProblemKind.NOT_COMMITTED, "", what)


def _of_names(manifest: Manifest, found: Listing) -> Iterator[Problem]:
    for record in manifest.files:
        yield from _of_file(record, found)
    for link in manifest.links:
        yield from _of_link(link.path, link.target, found)
    recorded = {record.path for record in manifest.files}
    recorded_links = {link.path for link in manifest.links}
    for path in found.files.keys() - recorded:
        yield Problem(ProblemKind.EXTRA, path, "there, but not recorded")
    for path in found.links.keys() - recorded - recorded_links:
        yield Problem(ProblemKind.NOT_A_FILE, path, "a symbolic link that is not recorded")
    for path in set(found.others) - recorded:
        yield Problem(ProblemKind.NOT_A_FILE, path, "neither a file nor a folder")
    for path, reason in found.unreadable.items():
        yield Problem(ProblemKind.UNREADABLE, path, reason)


def _of_file(record: FileRecord, found: Listing) -> Iterator[Problem]:
    path = record.path
    if escapes(path):
        yield Problem(ProblemKind.PATH_ESCAPES, path, "not a plain path; it was not opened")
    elif path in found.files:
        size = found.files[path].size_bytes
        if size != record.size_bytes:
            what = f"recorded {record.size_bytes} bytes, found {size}"
            yield Problem(ProblemKind.SIZE_DIFFERS, path, what)
    elif path in found.links or path in found.others or path in found.folders:
        yield Problem(ProblemKind.NOT_A_FILE, path, "not a regular file; it was not opened")
    else:
        yield Problem(ProblemKind.MISSING, path, "recorded, but not there")
    if record.sha256 is None:
        yield Problem(ProblemKind.CHECKSUM_ABSENT, path, "no checksum is recorded")


def _of_link(path: str, target: str, found: Listing) -> Iterator[Problem]:
    if escapes(path) or link_escapes(path, target):
        yield Problem(ProblemKind.PATH_ESCAPES, path, "the link leads out; it was not followed")
    elif found.links.get(path) != target:
        yield Problem(ProblemKind.LINK_DIFFERS, path, f"it should be a link to {target}")


def _of_state(checkpoint: Path, manifest: Manifest) -> Iterator[Problem]:
    """Where the files are those of the record, and what it says of them is not so.

    A format is compared only where no digest says more: its name may change with the reader.
    """
    step = describing.step_of(checkpoint)
    if None not in (step, manifest.completed_step) and step != manifest.completed_step:
        what = f"recorded step {manifest.completed_step}, trainer_state.json says {step}"
        yield Problem(ProblemKind.STATE_DIFFERS, "", what)
    recorded = (manifest.state_keys_sha256, manifest.shapes_sha256)
    listed = None if recorded == (None, None) else describing.tensors_of(checkpoint)
    if listed is not None:
        found = (describing.keys_digest(listed), describing.shapes_digest(listed))
        for name, before, now in zip(("keys", "shapes"), recorded, found, strict=True):
            if before not in (None, now):
                what = f"recorded {name} of tensors {before}, found {now}"
                yield Problem(ProblemKind.STATE_DIFFERS, "", what)
    elif manifest.format is not None:
        form = formats.recognise(checkpoint)
        if form not in (None, manifest.format):
            what = f"recorded format {manifest.format}, found {form}"
            yield Problem(ProblemKind.STATE_DIFFERS, "", what)


# --------------------------------------------------------------------------------------------------
# What has to be read


def _chosen(
    readable: Mapping[str, FileRecord], marker: CommitMarker | None, sample: Sample | None
) -> dict[str, int]:
    """The files to hash, with their sizes: all, or by a seeded order until the share is reached."""
    sizes = {p: record.size_bytes for p, record in readable.items() if record.sha256 is not None}
    if sample is None:
        return sizes
    wanted = sample.share * sum(sizes.values())
    chosen = {marker.file: sizes[marker.file]} if marker and marker.file in sizes else {}
    drawn = 0
    for path in sorted(sizes, key=lambda p: _lot(sample.seed, p)):
        if drawn >= wanted:
            break
        chosen[path] = sizes[path]
        drawn += sizes[path]
    return chosen


def _lot(seed: str, path: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{path}".encode(errors="surrogateescape")).digest()


def _of_content(
    readable: Mapping[str, FileRecord], results: Mapping[str, Digest | Problem]
) -> Iterator[Problem]:
    for path, result in results.items():
        record = readable[path]
        if isinstance(result, Problem):
            yield result
        elif result.stamp.size_bytes != record.size_bytes:
            yield Problem(ProblemKind.CHANGED_WHILE_READ, path, "cut or extended meanwhile")
        elif result.sha256 != record.sha256:
            what = f"recorded {record.sha256}, found {result.sha256}"
            yield Problem(ProblemKind.CHECKSUM_DIFFERS, path, what)


def _of_marker(
    marker: CommitMarker,
    found: Listing,
    results: Mapping[str, Digest | Problem],
    *,
    times_kept: bool,
) -> Iterator[Problem]:
    """The same file once more in its role, since a restore depends on it more than on any other."""
    stamp = found.files.get(marker.file)
    if stamp is None:
        yield Problem(ProblemKind.MARKER_MISSING, marker.file, "the save is not committed")
        return
    result = results.get(marker.file)
    same = isinstance(result, Digest) and result.sha256 == marker.sha256
    if marker.sha256 is None:
        yield Problem(ProblemKind.CHECKSUM_ABSENT, marker.file, "no checksum of the marker")
    elif not same and not isinstance(result, Problem):
        yield Problem(ProblemKind.MARKER_DIFFERS, marker.file, "other bytes than recorded")
    recorded_ns = ns_of_utc(marker.modified_time_utc)
    if not times_kept or recorded_ns is None:
        return
    when = f"recorded {marker.modified_time_utc}, found {utc_of_ns(stamp.modified_ns)}"
    if stamp.modified_ns // 1000 > recorded_ns // 1000:
        yield Problem(ProblemKind.MARKER_NEWER_THAN_MANIFEST, marker.file, when)
    elif stamp.modified_ns // 1000 < recorded_ns // 1000 and not same:
        yield Problem(ProblemKind.MANIFEST_NEWER_THAN_MARKER, marker.file, when)
