"""Identify the samples of a batch as the model consumed them: one hash per row.

Rows are matched across ranks and topologies by content. Every tensor of the forward call that has
the batch's leading dimension takes part, so that two samples with equal tokens but different labels
stay apart where the labels are passed to the model.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from . import fingerprint


def row_hashes(inputs: Any) -> list[str]:
    """16 hex digits per row of the leading dimension; empty when no tensor has one."""
    leaves = [leaf for leaf in _tensors(inputs, 0) if leaf.ndim > 0 and leaf.shape[0] > 0]
    if not leaves:
        return []
    rows = leaves[0].shape[0]
    columns = [fingerprint.row_hashes(leaf) for leaf in leaves if leaf.shape[0] == rows]
    if len(columns) == 1:
        return columns[0]
    return [
        hashlib.blake2b("".join(row).encode(), digest_size=8).hexdigest() for row in zip(*columns)
    ]


def _tensors(value: Any, depth: int) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [getattr(value, "_local_tensor", value).detach()]
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
