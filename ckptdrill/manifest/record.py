"""What a manifest says about one checkpoint, and what can be wrong with a checkpoint beside it.

Nouns only: the record with every field of the restore contract, to and from JSON, and the closed
list of problems. A field that nobody could tell is null, and its name stands in `unknown`; nothing
here is ever guessed. The JSON Schema of the file is `manifest.schema.json` beside this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

MANIFEST_VERSION = 1

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]


class Status(StrEnum):
    """Whether the checkpoint was published. Only a committed one may be restored."""

    IN_PROGRESS = "in_progress"
    COMMITTED = "committed"


class _Closed(BaseModel):
    """A part of the record whose keys are these and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class _Open(BaseModel):
    """A part that may carry further keys of its owner (`software.apex`), all JSON values."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class Software(_Open):
    """What wrote the checkpoint."""

    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    framework: str | None = None
    image_digest: str | None = None


class Hardware(_Open):
    """What it was written on."""

    gpu_arch: str | None = None
    gpu_count: Count | None = None


class Topology(_Open):
    """The parallel layout of the writer; degrees are numbers of ranks."""

    world_size: Count | None = None
    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    zero_stage: Count | None = None
    sharding: str | None = None
    optimizer_format: str | None = None


class Precision(_Open):
    """Element types of parameters and master weights, and the kind of loss scaler."""

    param: str | None = None
    master: str | None = None
    scaler: str | None = None


class TrainingState(_Open):
    """Counters beside the completed step."""

    epoch: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    micro_step: Count | None = None
    consumed_samples: Count | None = None


class Fingerprints(_Open):
    """Digests by which another model, tokenizer or data set is told from the saved one."""

    model_configuration: str | None = Field(default=None, alias="model_config")
    tokenizer: str | None = None
    dataset_manifest: str | None = None
    training_config: str | None = None


class DataCursor(_Open):
    """Where in its data the training was."""

    consumed_samples: Count | None = None
    per_rank_state: JsonValue = None
    dp_size: Count | None = None


class Rng(_Open):
    """What is promised about random state: continued, reseeded, not_guaranteed."""

    policy: str | None = None


class Storage(_Open):
    """Where it lies and when it got there; times as `2026-11-30T00:05:12.123456Z`.

    Staging is not durability: `durable_commit_time_utc` is set only once every file is on disk.
    """

    backend: str | None = None
    staged_time_utc: str | None = None
    durable_commit_time_utc: str | None = None


class CommitMarker(_Closed):
    """The file by which the writer itself says that it has finished; `file` is relative.

    `modified_time_utc` is the time of that file when the manifest was made: a marker written again
    later is told by it even where its bytes are the same.
    """

    file: str
    sha256: Sha256 | None = None
    modified_time_utc: str | None = None


class FileRecord(_Closed):
    """One file: path relative to the checkpoint with `/`, size, checksum as of `sha256sum`."""

    path: str
    size_bytes: Count = Field(alias="bytes")
    sha256: Sha256 | None = None


class LinkRecord(_Closed):
    """A symbolic link inside the checkpoint, by its text. It is compared and never followed."""

    path: str
    target: str


class Facts(_Closed):
    """What only the owner of a checkpoint can tell; every field may be left out."""

    checkpoint_id: str | None = None
    completed_step: Count | None = None
    software: Software = Software()
    hardware: Hardware = Hardware()
    topology: Topology = Topology()
    precision: Precision = Precision()
    training_state: TrainingState = TrainingState()
    fingerprints: Fingerprints = Fingerprints()
    data_cursor: DataCursor = DataCursor()
    rng: Rng = Rng()
    storage: Storage = Storage()
    omitted_state: tuple[str, ...] = ()
    relaxations: tuple[JsonValue, ...] = ()


# What a reader looks for first.
_FIRST = (
    "manifest_version",
    "checkpoint_id",
    "status",
    "format",
    "completed_step",
    "commit_marker",
)


class Manifest(Facts):
    """The record of one checkpoint.

    `format` is what `formats.recognise` says. `state_keys_sha256` is the SHA-256 of every tensor
    key in code-point order, each with a newline; `shapes_sha256` the same over
    `key<TAB>dtype<TAB>2x3` (nothing after the last tab for a scalar). `commit_marker` is null for
    formats that have none: the manifest itself is then the commit.
    """

    manifest_version: int = MANIFEST_VERSION
    status: Status = Status.COMMITTED
    format: str | None = None
    commit_marker: CommitMarker | None = None
    state_keys_sha256: Sha256 | None = None
    shapes_sha256: Sha256 | None = None
    files: tuple[FileRecord, ...] = ()
    links: tuple[LinkRecord, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> str:
        """The text of the manifest file: JSON with the keys of the contract."""
        value = self.model_dump(mode="json", by_alias=True)
        ordered = {name: value.pop(name) for name in _FIRST} | value
        return json.dumps(ordered, indent=1, ensure_ascii=False) + "\n"


def unknown_fields(manifest: Manifest) -> tuple[str, ...]:
    """Dotted names of the fields that are null because nobody could tell, sorted.

    A null `commit_marker` of a recognised format is no gap: that format has none.
    """
    value = manifest.model_dump(mode="json", by_alias=True, exclude={"files", "links"})
    names = set(_nulls(value, ""))
    if manifest.format is not None:
        names.discard("commit_marker")
    return tuple(sorted(names))


def _nulls(value: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, item in value.items():
        if item is None:
            yield f"{prefix}{name}"
        elif isinstance(item, dict):
            yield from _nulls(item, f"{prefix}{name}.")


class ProblemKind(StrEnum):
    """What can be wrong with a checkpoint beside its manifest; a closed list."""

    MANIFEST_MISSING = "manifest-missing"
    MANIFEST_UNREADABLE = "manifest-unreadable"
    VERSION_UNKNOWN = "version-unknown"
    NOT_COMMITTED = "not-committed"
    MARKER_MISSING = "marker-missing"
    MARKER_DIFFERS = "marker-differs"
    MARKER_NEWER_THAN_MANIFEST = "marker-newer-than-manifest"
    MANIFEST_NEWER_THAN_MARKER = "manifest-newer-than-marker"
    MISSING = "missing"
    EXTRA = "extra"
    SIZE_DIFFERS = "size-differs"
    CHECKSUM_DIFFERS = "checksum-differs"
    CHECKSUM_ABSENT = "checksum-absent"
    CHANGED_WHILE_READ = "changed-while-read"
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not-a-file"
    LINK_DIFFERS = "link-differs"
    PATH_ESCAPES = "path-escapes"
    STATE_DIFFERS = "state-differs"


MEANING = {
    ProblemKind.MANIFEST_MISSING: "there is no manifest where it belongs",
    ProblemKind.MANIFEST_UNREADABLE: "the manifest is not one: torn, no JSON, a wrong type, a path "
    "named twice, or too large",
    ProblemKind.VERSION_UNKNOWN: "a newer ckptdrill wrote the manifest; nothing was checked",
    ProblemKind.NOT_COMMITTED: "the status is not `committed`: publishing it has not finished",
    ProblemKind.MARKER_MISSING: "the writer's own commit marker is gone",
    ProblemKind.MARKER_DIFFERS: "the commit marker has other bytes than recorded",
    ProblemKind.MARKER_NEWER_THAN_MANIFEST: "the commit marker was written again after the "
    "manifest was made: the manifest describes an earlier save",
    ProblemKind.MANIFEST_NEWER_THAN_MARKER: "the commit marker is an older one than recorded, with "
    "other bytes: the manifest describes a later save than the marker commits",
    ProblemKind.MISSING: "recorded, but not there",
    ProblemKind.EXTRA: "there, but not recorded",
    ProblemKind.SIZE_DIFFERS: "another size than recorded; not read any further",
    ProblemKind.CHECKSUM_DIFFERS: "the recorded size, but another SHA-256",
    ProblemKind.CHECKSUM_ABSENT: "the record holds no checksum, so nothing was verified",
    ProblemKind.CHANGED_WHILE_READ: "written, cut or replaced while it was hashed",
    ProblemKind.UNREADABLE: "the system refuses to read it",
    ProblemKind.NOT_A_FILE: "a folder, link, pipe, socket or device where a file belongs; "
    "not opened",
    ProblemKind.LINK_DIFFERS: "a recorded symbolic link has another text, or is none any more",
    ProblemKind.PATH_ESCAPES: "a path or link leads out of the checkpoint; not opened",
    ProblemKind.STATE_DIFFERS: "the files are as recorded, but not the step, format, tensor keys "
    "or shapes that are recorded of them: the record was edited",
}


@dataclass(frozen=True, order=True)
class Problem:
    """One finding. `path` is relative to the checkpoint, `""` for the checkpoint as a whole."""

    kind: ProblemKind
    path: str
    explanation: str

    def __str__(self) -> str:
        """One line for a terminal, safe for any file name."""
        where = f" {printable(self.path)}:" if self.path else ""
        return f"{self.kind}:{where} {printable(self.explanation)}"


class ProblemError(Exception):
    """The one problem that ended some work; it becomes a finding, or a user error."""

    def __init__(self, kind: ProblemKind, path: str, explanation: str) -> None:
        super().__init__(explanation)
        self.problem = Problem(kind, path, explanation)


def printable(text: str) -> str:
    """`text` with everything escaped that a terminal or an encoder could stumble over."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
