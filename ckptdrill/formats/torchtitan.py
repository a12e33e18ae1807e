"""Checkpoints of TorchTitan: a DCP folder `step-N/` whose weights lie at the root of the keys.

Signature: the keys `train_state` and `lr_scheduler` or `dataloader` in one DCP checkpoint. A
model-only export has none of them and is plain DCP.
"""

from __future__ import annotations

from ckptdrill.formats import contents
from ckptdrill.formats.contents import Found, Holdings

NAME = "torchtitan"
COMMIT = ".metadata is written last: with it, the checkpoint is committed"


def recognises(found: Found) -> bool:
    """By the keys beside the weights."""
    return any(
        part.form == contents.DCP
        and "train_state" in part.tops
        and part.tops & {"lr_scheduler", "dataloader"}
        for part in found.parts
    )


def holdings(found: Found) -> Holdings:
    """Everything, under its own keys."""
    return contents.placed(found)
