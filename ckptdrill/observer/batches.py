"""Identify the samples of a batch as the model consumed them: one hash per row.

Rows are matched across ranks and topologies by content. Every tensor of the forward call that has
the batch's leading dimension takes part, so that two samples with equal tokens but different labels
stay apart where the labels are passed to the model. What a gradient flows back through is no
sample: a later stage of a pipeline gets activations, a second part of a model what the first made.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from . import fingerprint


def row_hashes(inputs: Any, *, activations: bool = False) -> list[str]:
    """16 hex digits per row of the leading dimension; empty when no tensor has one.

    Of samples, or with `activations` of what requires a gradient.
    """
    return _joined(_columns(inputs, activations=activations))


def _joined(leaves: list[torch.Tensor]) -> list[str]:
    """One hash for each row of several tensors."""
    columns = [fingerprint.row_hashes(leaf) for leaf in leaves]
    if len(columns) < 2:
        return columns[0] if columns else []
    return [
        hashlib.blake2b("".join(row).encode(), digest_size=8).hexdigest() for row in zip(*columns)
    ]


def sample_hashes(inputs: Any) -> tuple[list[str], list[list[str]]]:
    """`row_hashes` of the samples, and where they are one tensor of integers the hashes of each row
    without its last elements.
    """
    leaves = _columns(inputs, activations=False)
    if len(leaves) == 1:
        return fingerprint.shorter_row_hashes(leaves[0])
    return _joined(leaves), []


def row_shapes(inputs: Any) -> list[list[int]]:
    """The shapes of one row of the samples, one of each tensor: other shapes, another form."""
    return [list(leaf.shape[1:]) for leaf in _columns(inputs, activations=False)]


def _columns(inputs: Any, *, activations: bool) -> list[torch.Tensor]:
    """The tensors that share the batch's leading dimension."""
    leaves = [
        leaf
        for leaf, flows_back in _tensors(inputs, 0)
        if flows_back == activations and leaf.ndim > 0 and leaf.shape[0] > 0
    ]
    return [leaf for leaf in leaves if leaf.shape[0] == leaves[0].shape[0]]


def _tensors(value: Any, depth: int) -> list[tuple[torch.Tensor, bool]]:
    """The tensors of an input, each with whether a gradient flows back through it."""
    if isinstance(value, torch.Tensor):
        return [(getattr(value, "_local_tensor", value).detach(), value.requires_grad)]
    if depth > 4:
        return []
    if isinstance(value, dict) or hasattr(value, "keys"):
        return [
            leaf
            for key in sorted(value.keys(), key=str)
            for leaf in _tensors(value[key], depth + 1)
        ]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _tensors(item, depth + 1)]
    return []
