"""Checkpoints of Megatron-Core's distributed checkpointing (`torch_dist`).

Signature: `metadata.json` with the key `sharded_backend`. The shards are a DCP folder; `common.pt`
holds what every rank has alike: arguments, iteration, scheduler.
"""

from __future__ import annotations

from typing import Any

from ckptdrill.formats import contents
from ckptdrill.formats.contents import Found, Holdings, Part

NAME = "megatron"
COMMIT = "metadata.json is written last; then the pointer latest_checkpointed_iteration.txt"
_METADATA = "metadata.json"
_COMMON = "common.pt"


def recognises(found: Found) -> bool:
    """By the key in `metadata.json`."""
    return _METADATA in found.names and "sharded_backend" in _metadata(found)


def holdings(found: Found) -> Holdings:
    """The shards under their own keys, `common.pt` under `common`."""
    held = contents.placed(found, _place)
    missing = [] if _COMMON in found.names else [f"{_COMMON} is missing"]
    said = {
        f"megatron {key}": str(value)[:64]
        for key, value in _metadata(found).items()
        if isinstance(value, (str, int)) and "backend" in key
    }
    versions = {**held.versions, **said}
    return Holdings(held.tensors, held.leaves, versions, held.problems, held.notes).also(
        problems=missing
    )


def _metadata(found: Found) -> dict[str, Any]:
    content = found.json(_METADATA)
    return content if isinstance(content, dict) else {}


def _place(part: Part) -> str:
    return "common" if part.path == _COMMON else ""
