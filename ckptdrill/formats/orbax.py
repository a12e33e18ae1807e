"""Checkpoints of Orbax (JAX): what they hold, from the JSON files beside the arrays.

Signature: `_CHECKPOINT_METADATA` with `item_handlers`, or an item's `_METADATA` with
`tree_metadata`. The arrays themselves are compressed chunks in an OCDBT database, which is not
opened: their types stay unknown, and their elements cannot be compared here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from ckptdrill.formats import leaves
from ckptdrill.formats.contents import Found, Holdings
from ckptdrill.formats.layout import TensorMeta

NAME = "orbax"
COMMIT = "the folder is renamed when it is whole; on object stores, commit_success.txt"
STEP_METADATA = "_CHECKPOINT_METADATA"
ITEM_METADATA = "_METADATA"
_IN_PROGRESS = ".orbax-checkpoint-tmp"
_MAX_ARRAYS = 50_000
_MAX_KEY_LENGTH = 512


def recognises(found: Found) -> bool:
    """By the keys of its JSON files."""
    return "item_handlers" in _mapping(found, STEP_METADATA) or bool(_items(found))


def holdings(found: Found) -> Holdings:
    """Keys and shapes from each item's tree; a missing database or commit time is a problem."""
    arrays: dict[str, TensorMeta] = {}
    scalars: dict[str, leaves.Leaf] = {}
    for folder in _items(found):
        for key, entry in _tree(found, folder):
            shape = _shape(entry)
            if shape is None:
                scalars[key] = leaves.leaf("not read: inside the database")
            else:
                arrays[key] = TensorMeta("unknown", shape, ())
    notes = ["the arrays are compressed: types and elements are not read"] if arrays else []
    return Holdings(arrays, scalars, {}, tuple(_problems(found)), tuple(notes))


def _mapping(found: Found, name: str) -> Mapping[str, Any]:
    content = found.json(name) if name in found.names else None
    return content if isinstance(content, dict) else {}


def _items(found: Found) -> list[str]:
    """The folders with a tree of arrays, at most one level down."""
    names = [name for name in found.names if PurePosixPath(name).name == ITEM_METADATA]
    return [
        PurePosixPath(name).parent.as_posix()
        for name in names
        if name.count("/") <= 1 and "tree_metadata" in _mapping(found, name)
    ]


def _tree(found: Found, folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    name = (PurePosixPath(folder) / ITEM_METADATA).as_posix()
    tree = _mapping(found, name).get("tree_metadata")
    entries = list(tree.values())[:_MAX_ARRAYS] if isinstance(tree, dict) else []
    for entry in entries:
        parts = entry.get("key_metadata") if isinstance(entry, dict) else None
        if isinstance(parts, list):
            keys = [str(part.get("key"))[:_MAX_KEY_LENGTH] for part in parts if _is_mapping(part)]
            yield ".".join(keys[:64])[:_MAX_KEY_LENGTH], entry


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape that was written; None for a scalar, whose value is in the database."""
    about = entry.get("value_metadata")
    shape = about.get("write_shape") if isinstance(about, dict) else None
    sound = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    if not sound or not isinstance(shape, list) or math.prod(shape) >= 1 << 62:
        return None
    return tuple(shape[:16])


def _problems(found: Found) -> Iterator[str]:
    if _IN_PROGRESS in found.root.name:
        yield f"the name of the folder says that its save has not ended ({_IN_PROGRESS})"
    about = _mapping(found, STEP_METADATA)
    if about and not about.get("commit_timestamp_nsecs"):
        yield f"{STEP_METADATA} has no time of a commit"
    if not _items(found):
        yield f"no item has its {ITEM_METADATA}"
    for folder in _items(found):
        for name in ("manifest.ocdbt",):
            path = (PurePosixPath(folder) / name).as_posix()
            if path not in found.names:
                yield f"{path} is missing"
