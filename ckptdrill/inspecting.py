"""What `ckptdrill inspect` prints: a checkpoint's format, its class and why, and what it holds.

The checkpoint is read first, as a whole and without executing anything in it; then it is shown, as
a page for people or as JSON for programs. Whatever comes from its files is shown as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ckptdrill import formats
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.formats import stacks
from ckptdrill.formats.classify import Classification, classify
from ckptdrill.formats.layout import Chunk, TensorMeta
from ckptdrill.formats.leaves import printable
from ckptdrill.formats.stacks import Checkpoint

_MAX_ROWS = 2_000
_MAX_LOCATED = 2_000


def inspect(path: Path, *, as_json: bool) -> ExitCode:
    """Print everything about the checkpoint at `path`.

    Raises UserError when nothing can be read.
    """
    checkpoint = stacks.read(path)
    said = classify(checkpoint)
    if as_json:
        print(json.dumps(document(checkpoint, said), indent=2))  # noqa: T201 - the output
    else:
        for line in page(checkpoint, said):
            print(line)  # noqa: T201 - same
    return ExitCode.AS_EXPECTED


def document(checkpoint: Checkpoint, said: Classification) -> dict[str, Any]:
    """All of it as JSON. Sizes and offsets are in bytes; `payload_offset` is that of the raw
    elements, null where the file does not have them in one run.
    """
    located = iter(range(_MAX_LOCATED))
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.form,
        "class": said.usable.value,
        "because": list(said.because),
        "commit_rule": checkpoint.commit,
        "problems": list(checkpoint.problems),
        "notes": list(checkpoint.notes),
        "versions": dict(checkpoint.versions),
        "wrappers": list(wrappers(checkpoint)),
        "size_bytes": checkpoint.size_bytes,
        "evidence": [
            {"state": e.kind.value, "keys": e.count, "example": e.example} for e in said.evidence
        ],
        "files": [
            {"path": file.path, "role": file.role.value, "rank": file.rank}
            for file in checkpoint.files
        ],
        "tensors": [
            {
                "key": tensor.key,
                "state": tensor.sort.moment or tensor.sort.kind.value,
                "name": tensor.sort.name,
                "dtype": tensor.stored.dtype,
                "shape": list(tensor.stored.shape),
                "size_bytes": tensor.stored.size_bytes,
                "flat": tensor.stored.flat,
                "chunks": list(_chunks(checkpoint, tensor.stored, located)),
            }
            for tensor in checkpoint.tensors
        ],
        "values": {key: leaf.text for key, _, leaf in checkpoint.leaves},
    }


def _chunks(
    checkpoint: Checkpoint, stored: TensorMeta, located: Iterator[int]
) -> Iterator[dict[str, Any]]:
    for chunk in stored.chunks:
        offset = None if chunk.zipped else chunk.offset_bytes
        if chunk.zipped and next(located, None) is not None:
            offset = _payload_offset(checkpoint, chunk)
        yield {
            "offsets": list(chunk.offsets),
            "sizes": list(chunk.sizes),
            "file": chunk.file,
            "stored_offset": chunk.offset_bytes,
            "stored_bytes": chunk.length_bytes,
            "payload_offset": offset,
        }


def _payload_offset(checkpoint: Checkpoint, chunk: Chunk) -> int | None:
    try:
        return formats.payload(checkpoint.root, chunk)[1]
    except UserError:
        return None


def wrappers(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The parts of keys that only wrappers add, sorted: names are compared without them."""
    return tuple(sorted({part for t in checkpoint.tensors for part in t.sort.wrappers}))


# --------------------------------------------------------------------------------------------------
# The page


def page(checkpoint: Checkpoint, said: Classification) -> Iterator[str]:
    """The page, line by line."""
    yield from columns([(name, printable(text, 400)) for name, text in _facts(checkpoint, said)])
    yield ""
    yield from columns(_evidence(said))
    yield ""
    yield from columns(_tensors(checkpoint))
    yield from _left(len(checkpoint.tensors) - _MAX_ROWS, "tensors")
    yield ""
    for key, _, leaf in checkpoint.leaves[:_MAX_ROWS]:
        yield f"{printable(key, 120)} = {leaf.text}"
    yield from _left(len(checkpoint.leaves) - _MAX_ROWS, "values")


def columns(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Rows of equal length as lines with aligned columns."""
    kept = list(rows)
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    for row in kept:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _left(count: int, what: str) -> Iterator[str]:
    if count > 0:
        yield f"… and {count} more {what}: --json has them"


def _facts(checkpoint: Checkpoint, said: Classification) -> Iterator[tuple[str, str]]:
    yield "checkpoint", str(checkpoint.path)
    yield "format", checkpoint.form
    yield "class", said.usable.value
    yield from (("", text) for text in said.because)
    yield "committed", checkpoint.commit
    yield "size", f"{checkpoint.size_bytes:,} bytes in {len(checkpoint.files)} files"
    if checkpoint.versions:
        yield "written by", ", ".join(f"{k} {v.strip()}" for k, v in checkpoint.versions)
    if wrappers(checkpoint):
        yield "wrappers", f"{', '.join(wrappers(checkpoint))} in the keys, taken off the names"
    yield from (("note", text) for text in checkpoint.notes)


def _evidence(said: Classification) -> Iterator[tuple[str, ...]]:
    yield "state", "keys", "for example"
    for each in said.evidence:
        found = str(each.count) if each.count else "none"
        yield each.kind.value, found, printable(each.example, 100)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    yield "tensor", "state", "dtype", "shape", "chunks", "bytes"
    for tensor in checkpoint.tensors[:_MAX_ROWS]:
        stored = tensor.stored
        yield (
            printable(tensor.key, 120),
            printable(tensor.sort.moment or tensor.sort.kind.value),
            stored.dtype,
            str(list(stored.shape)),
            str(len(stored.chunks)),
            f"{stored.size_bytes:,}",
        )
