"""Tell what each layer of a model makes of the first batch: in a launch that exists for that alone.

Where the first gradients of two topologies differ although state and samples are equal, the first
layer whose output differs is where to look. Ranks hold other rows of the batch, and slices of other
lengths, so an output is told by what does not depend on that: over all of its rows (every index but
the last), the mean of eight projections of a row, and of its square. The judge adds ranks up by
their rows. In order: `watch` puts a hook on every module once the first step begins; the hook adds
to the sums; `told` is what was added up when the optimizer steps.
"""

from __future__ import annotations

from typing import Any

import torch

from . import fingerprint
from .names import Roots


class Layers:
    """The sums of every module's outputs, by its name, in the order of the first calls."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}
        self._hooks: list[Any] = []

    def watch(self, roots: Roots) -> None:
        """Put the hooks in place, once."""
        if self._hooks:
            return
        for name, module in roots.layers():
            self._hooks.append(module.register_forward_hook(self._hook(name)))

    def told(self) -> dict[str, Any]:
        """`{"blocks.0": [features, rows, [8 sums of projections, sum of squares]]}`; ends it."""
        for hook in self._hooks:
            hook.remove()
        return self._sums

    def _hook(self, name: str) -> Any:
        def add(_module: Any, _inputs: Any, output: Any) -> None:
            try:
                self._add(name, output)
            except Exception:  # the job is not to fail for it: a layer less is told
                self._sums.pop(name, None)

        return add

    def _add(self, name: str, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(first, torch.Tensor) or not first.is_floating_point():
            return
        local = getattr(first, "_local_tensor", first).detach()
        features = local.shape[-1] if local.dim() else 1
        rows = local.reshape(-1, features).double()
        total = rows.sum(0)
        numbers = [*fingerprint.project(total), float((rows * rows).sum())]
        if name not in self._sums:
            self._sums[name] = [features, 0, [0.0] * len(numbers)]
        kept = self._sums[name]
        if kept[0] == features:
            kept[1] += rows.shape[0]
            kept[2] = [a + b for a, b in zip(kept[2], numbers)]
