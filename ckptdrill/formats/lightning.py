"""Checkpoints of Lightning: one file, or a folder of a DCP checkpoint and `meta.pt`.

Signature: the key `pytorch-lightning_version`, which is also its writer's version.
"""

from __future__ import annotations

from ckptdrill.formats import contents
from ckptdrill.formats.contents import Found, Holdings, Part

NAME = "lightning"
COMMIT = "none of its own: the zip's directory, or .metadata of the DCP folder and then meta.pt"
_SIGNATURE = "pytorch-lightning_version"


def recognises(found: Found) -> bool:
    """By the key with the version."""
    return any(_SIGNATURE in part.tops for part in found.parts)


def holdings(found: Found) -> Holdings:
    """Everything, under its own keys: Lightning's say what they hold."""
    return contents.placed(found, _place)


def _place(part: Part) -> str:
    return "" if _SIGNATURE in part.tops else contents.plain_place(part)
