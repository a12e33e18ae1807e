"""Says what each file of a checkpoint is for: data of which rank, metadata, marker or pointer.

The content decides where it can: files of torch.save and of safetensors begin in their own way, a
pointer is a line of text that names something beside it. Names decide only what content cannot
show: which rank wrote a file, and what an empty marker or a file of JSON is for.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from ckptdrill.formats import dcp, listing, safetensors, torch_save
from ckptdrill.formats.layout import Role, StoredFile

_HEAD_BYTES = 256
_POINTER_BYTES = 512
# The number that differs between the files of two ranks, as the frameworks write it.
_RANK = (
    re.compile(r"^__(\d+)_\d+\.distcp$"),
    re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+"),
    re.compile(r"mp_rank_(\d+)_model_states"),
    re.compile(r"^(?:rng_state|random_states|rng)_(\d+)\."),
    re.compile(r"process_(\d+)(?:/|$)"),
    re.compile(r"(?:^|[^a-z])rank[_-]?(\d+)(?:\D|$)", re.IGNORECASE),
)
_MARKERS = re.compile(
    r"commit_success\.txt|_?success|_?commit(ted)?|_?complete(d)?|done|\.?[\w-]+\.(complete|committed)",
    re.IGNORECASE,
)
_METADATA = re.compile(
    r"\.metadata|_METADATA|_CHECKPOINT_METADATA|_sharding|manifest\.ocdbt|[\w.-]+\.json"
)


def files(checkpoint: Path) -> tuple[StoredFile, ...]:
    """Every regular file of a checkpoint (a file or a folder) with its role, sorted by path.

    DCP's `.metadata` is listed as metadata; being written last, it is the marker as well. Links
    are not listed. Raises UserError when the folder cannot be listed or holds too many files.
    """
    if checkpoint.is_file():
        return (StoredFile(checkpoint.name, _role(checkpoint), rank(checkpoint.name)),)
    return tuple(
        StoredFile(name, _role(checkpoint / name), rank(name)) for name in listing.names(checkpoint)
    )


def rank(name: str) -> int | None:
    """The rank that wrote the file `name`, or that its folder belongs to; None if not said."""
    for part in reversed(PurePosixPath(name).parts):
        for pattern in _RANK:
            found = pattern.search(part)
            if found:
                return int(found[1][:9])
    return None


def _role(path: Path) -> Role:
    head = listing.head(path, _HEAD_BYTES)
    if path.suffix == ".distcp" or "ocdbt.process_" in path.parent.as_posix():
        return Role.DATA
    if torch_save.is_torch_save(head) or safetensors.is_safetensors(head):
        return Role.DATA
    if _points(path):
        return Role.POINTER
    if _MARKERS.fullmatch(path.name):
        return Role.MARKER
    if path.name == dcp.METADATA_NAME or _METADATA.fullmatch(path.name):
        return Role.METADATA
    return _role_by_place(path, head)


def _role_by_place(path: Path, head: bytes) -> Role:
    """Of bytes without a signature: data in the folders where Orbax keeps it, or a pickle."""
    in_ocdbt = path.parent.name == "d" and (path.parent.parent / "manifest.ocdbt").exists()
    return Role.DATA if in_ocdbt or head[:1] == b"\x80" else Role.OTHER


def _points(path: Path) -> bool:
    """A line of text that names a file or folder beside it, or the number at the end of one."""
    line = pointer_text(path)
    if line is None:
        return False
    if not line.isdecimal():
        return (path.parent / line).exists()
    return any(re.fullmatch(rf"[A-Za-z_-]+0*{line}", name) for name in listing.entries(path.parent))


def pointer_text(path: Path) -> str | None:
    """The one line of a small text file when it could be a name beside it; else None."""
    content = listing.head(path, _POINTER_BYTES)
    try:
        line = content.decode("ascii").strip()
    except UnicodeDecodeError:
        return None
    plain = re.fullmatch(r"[\w.+=-]+", line) and line not in {".", ".."}
    return line if plain and len(content) < _POINTER_BYTES else None
