"""Let a launch that exists for that alone draw other random numbers from one step on.

Where the owner promises no random state across a restore, the restored run draws other masks and
noise than its reference. How far apart two runs are for that reason alone is seen in a run that
differs from the reference in nothing else: `begin_another` seeds every generator of the process
anew, from where it stands, so that ranks which drew alike go on drawing alike.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def begin_another() -> None:
    """Seed the generators of Python, NumPy and torch, of every device, with what they hold."""
    seed = int.from_bytes(hashlib.blake2b(_held(), digest_size=4).digest(), "big")
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _held() -> bytes:
    return bytes(torch.get_rng_state().tolist()) + repr(random.getstate()).encode()
