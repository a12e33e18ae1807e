"""The manifest of a checkpoint: what was saved, file by file, and whether it still is.

`describe` makes one, `verify` compares a checkpoint with it, `check` with the one that lies there,
`select` finds the newest valid checkpoint below a folder, and `publish` puts a checkpoint in place
so that no reader ever sees half of it. Only `commit`, `write` and `publish` write anything.
"""

from __future__ import annotations

from ckptdrill.manifest.describing import commit, describe
from ckptdrill.manifest.publishing import Published, publish
from ckptdrill.manifest.record import (
    MANIFEST_VERSION,
    Facts,
    Manifest,
    Problem,
    ProblemKind,
    Status,
)
from ckptdrill.manifest.selecting import Generation, Pointer, Pointing, Selection, Standing, select
from ckptdrill.manifest.sidecar import path_of, read, write
from ckptdrill.manifest.verifying import Audit, Sample, audit, check, verify

__all__ = [
    "MANIFEST_VERSION",
    "Audit",
    "Facts",
    "Generation",
    "Manifest",
    "Pointer",
    "Pointing",
    "Problem",
    "ProblemKind",
    "Published",
    "Sample",
    "Selection",
    "Standing",
    "Status",
    "audit",
    "check",
    "commit",
    "describe",
    "path_of",
    "publish",
    "read",
    "select",
    "verify",
    "write",
]
