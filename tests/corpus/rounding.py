"""Give every gradient of a training script the rounding that another kernel would give it.

A GPU kernel adds in an order of its own at each shape, so that the last digit of a gradient differs
from topology to topology and, where it uses atomics, from run to run. `spread` stands for it on a
CPU: on its way back through each module every element moves by up to one unit in the last place of
its dtype. The numbers differ between launches and are equal on the ranks of one, as they would be
where ranks compute the same thing; no generator of the job is drawn from.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_CALLS = itertools.count()


def spread(salt: str) -> None:
    """From here on, in this process; `salt` makes a run of the drill another one."""
    seed = zlib.crc32(repr((salt, sys.argv)).encode())

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                call = next(_CALLS)
                tensor.register_hook(lambda gradient, call=call: _moved(gradient, (seed, call)))

    nn.modules.module.register_module_forward_hook(after)


def _moved(gradient: Tensor, seed: tuple[int, int]) -> Tensor:
    with torch.no_grad():
        moved = gradient.clone()
        local = moved.to_local() if isinstance(moved, DTensor) else moved
        # One of -1, 0 and 1 for each element, times the distance to the next number of the dtype.
        steps = np.random.default_rng(seed).integers(-1, 2, local.shape)
        local.mul_(1 + torch.from_numpy(steps) * torch.finfo(local.dtype).eps)
        return moved
