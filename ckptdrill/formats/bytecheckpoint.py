"""Checkpoints of ByteCheckpoint: DCP folders `model` and `optimizer`, and files of each rank.

Signature: two DCP folders of these names beside `extra_state/` with files of torch.save. The file
`latest_checkpointed_iteration.txt` proves nothing: Megatron writes one, too.
"""

from __future__ import annotations

from ckptdrill.formats import contents, roles
from ckptdrill.formats.contents import Found, Holdings, Part

NAME = "bytecheckpoint"
COMMIT = "none in the folder: .metadata of both DCP folders, then the pointer beside the folder"
_EXTRA = "extra_state/"


def recognises(found: Found) -> bool:
    """By its two folders and the files of the ranks."""
    folders = {part.path for part in found.parts if part.form == contents.DCP}
    return {"model", "optimizer"} <= folders and any(
        part.path.startswith(_EXTRA) for part in found.parts
    )


def holdings(found: Found) -> Holdings:
    """Parts by their folder; a rank below the highest without a file is a problem."""
    held = contents.placed(found, _place)
    ranks = {roles.rank(part.path) for part in found.parts if part.path.startswith(_EXTRA)}
    expected = range(max((rank for rank in ranks if rank is not None), default=0))
    missing = (rank for rank in expected if rank not in ranks)
    return held.also(problems=(f"the extra state of rank {rank} is missing" for rank in missing))


def _place(part: Part) -> str:
    if part.path.startswith(_EXTRA):
        return f"extra.{roles.rank(part.path)}"
    return "" if part.tops <= {part.path} else part.path
