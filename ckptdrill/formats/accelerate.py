"""Checkpoints of Accelerate's `save_state`: the files of the Trainer without its own counters.

Signature: a file whose keys are `random_state` and `torch_manual_seed`.
"""

from __future__ import annotations

import re

from ckptdrill.formats import hf_trainer
from ckptdrill.formats.contents import Found, Holdings, Part

NAME = "accelerate"
COMMIT = "none: the folder gets its files one by one, the random states last"
_SIGNATURE = frozenset({"random_state", "torch_manual_seed"})
_CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")


def recognises(found: Found) -> bool:
    """By the keys of the random states."""
    return any(part.tops >= _SIGNATURE for part in found.parts)


def holdings(found: Found) -> Holdings:
    """Parts by their file names."""
    held = hf_trainer.placed(found, _place)
    return held.also(problems=hf_trainer.missing_random_states(found))


def _place(part: Part) -> str | None:
    custom = _CUSTOM.fullmatch(part.name)
    return f"custom.{custom[1]}" if custom else hf_trainer.place(part)
