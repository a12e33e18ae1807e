"""Checkpoints without a stack of their own: DCP, torch.save and safetensors as jobs write them.

What a key means, only the job knows; its names are read as people usually give them.
"""

from __future__ import annotations

from ckptdrill.formats import contents, dcp
from ckptdrill.formats.contents import Found, Holdings

NAME = "parts"
COMMITS = {
    contents.DCP: f"{dcp.METADATA_NAME} is written last: with it, the checkpoint is committed",
    contents.TORCH_SAVE: "none: a zip whose directory is whole; the directory is written last",
    contents.SAFETENSORS: "none: a header that accounts for every byte of the file",
    NAME: "none that the parts share: each is committed by its own rule",
}


def recognises(found: Found) -> bool:
    """Whether anything here can be read at all."""
    return bool(found.parts)


def name(found: Found) -> str:
    """The form of the parts, when they share one; else `parts`."""
    forms = {part.form for part in found.parts}
    return next(iter(forms)) if len(forms) == 1 else NAME


def holdings(found: Found) -> Holdings:
    """Everything, under its own keys."""
    return contents.placed(found, contents.plain_place)
