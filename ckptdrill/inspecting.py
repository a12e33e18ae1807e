"""What `ckptdrill inspect` prints: a checkpoint's format, its class and why, and what it holds.

The checkpoint is read first, as a whole and without executing anything in it; then it is shown, as
a page for people or as JSON for programs. Whatever comes from its files is shown as plain text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
        _show(checkpoint, said)
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


def _show(checkpoint: Checkpoint, said: Classification) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for name, text in _facts(checkpoint, said):
        console.print(Text(f"{name:<12}{printable(text, 400)}"), soft_wrap=True)
    console.print(_evidence(said))
    console.print(_tensors(checkpoint))
    for key, _, leaf in checkpoint.leaves[:_MAX_ROWS]:
        console.print(Text(f"{printable(key, 120)} = {leaf.text}"), soft_wrap=True)
    left = len(checkpoint.leaves) - _MAX_ROWS
    if left > 0:
        console.print(Text(f"… and {left} more values: --json has them"))


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


def _evidence(said: Classification) -> Table:
    table = Table("state", "keys", "for example", box=None, header_style="bold")
    for each in said.evidence:
        found = str(each.count) if each.count else "none"
        table.add_row(each.kind.value, found, Text(printable(each.example, 100)))
    return table


def _tensors(checkpoint: Checkpoint) -> Table:
    table = Table("tensor", "state", "dtype", "shape", "chunks", "bytes", box=None)
    for tensor in checkpoint.tensors[:_MAX_ROWS]:
        table.add_row(
            Text(printable(tensor.key, 120)),
            Text(printable(tensor.sort.moment or tensor.sort.kind.value)),
            tensor.stored.dtype,
            Text(str(list(tensor.stored.shape))),
            str(len(tensor.stored.chunks)),
            f"{tensor.stored.size_bytes:,}",
        )
    left = len(checkpoint.tensors) - _MAX_ROWS
    if left > 0:
        table.caption = f"… and {left} more tensors: --json has them"
    return table
