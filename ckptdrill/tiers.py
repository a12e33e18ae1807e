"""Gives every launch a memory tier of its own, and takes away from it what the drill says is lost.

A memory tier is a folder, usually on a tmpfs, in which a job keeps fast checkpoints beside its
durable ones. In order, for a restore: what the failed launch left there is copied to disk; the loss
is carried out on that copy and written down, with the hash of every file that is removed; the copy
is then put where the launch looks for it. Nothing that a launch wrote is changed.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.isolate import private_copy
from ckptdrill.model import MemoryTier, Tier, TierLoss
from ckptdrill.placeholders import fill
from ckptdrill.store import RunFolder, sha256_of, tree_files


def root(tier: MemoryTier, run: RunFolder) -> Path:
    """The folder of all memory tiers of one run."""
    name = hashlib.sha256(str(run.root.absolute()).encode()).hexdigest()[:16]
    return Path(tier.base) / f"ckptdrill-{name}"


def folder(tier: MemoryTier, run: RunFolder, launch_id: str) -> Path:
    """`{memory_tier}` of a launch."""
    return root(tier, run) / launch_id


def give(declared: MemoryTier, run: RunFolder, launch_id: str, tier: Tier | None) -> dict[str, Any]:
    """Make the tier of a launch: empty, or what `tier` says is left of another one.

    The record has `from`, `loss`, `rank`, and `removed` and `left`: path, size in bytes and SHA-256
    of each file. Raises UserError when the other tier is gone, or holds nothing.
    """
    target = folder(declared, run, launch_id)
    shutil.rmtree(target, ignore_errors=True)
    if tier is None:
        target.mkdir(parents=True)
        return {}
    source = folder(declared, run, tier.launch_id)
    if not any(source.rglob("*")):
        raise UserError(
            f"{tier.launch_id} left nothing in its memory tier",
            where=str(source),
            hint="does the job save below {memory_tier}? A tmpfs does not outlive a reboot: then "
            "start a new run",
        )
    kept = left_for(run, launch_id)
    shutil.rmtree(kept, ignore_errors=True)
    private_copy(source, kept)
    removed = _lose(declared, tier, kept)
    target.parent.mkdir(parents=True, exist_ok=True)
    private_copy(kept, target)
    return {
        "from": tier.launch_id,
        "loss": tier.loss,
        "rank": tier.rank,
        "removed": removed,
        "left": _listed(kept),
    }


def left_for(run: RunFolder, launch_id: str) -> Path:
    """What a launch found in its memory tier, kept on disk for a replay."""
    return run.work(launch_id) / "memory-tier"


def _lose(declared: MemoryTier, tier: Tier, kept: Path) -> list[list[Any]]:
    before = _listed(kept)
    if tier.loss is TierLoss.ALL:
        for path in kept.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif tier.loss is TierLoss.ONE_RANK:
        pattern = fill(declared.rank_files, {"rank": tier.rank}, "job.memory_tier.rank_files")
        for path in sorted(kept.glob(pattern)):
            path.unlink()
    after = {tuple(entry) for entry in _listed(kept)}
    return [entry for entry in before if tuple(entry) not in after]


def _listed(kept: Path) -> list[list[Any]]:
    return [
        [path.relative_to(kept).as_posix(), path.stat().st_size, sha256_of(path)]
        for path in tree_files(kept)
    ]


def remove(tier: MemoryTier | None, run: RunFolder, launch_id: str | None = None) -> None:
    """Give the memory of all tiers of a run back, or of one launch."""
    if tier is not None:
        gone = root(tier, run) if launch_id is None else folder(tier, run, launch_id)
        shutil.rmtree(gone, ignore_errors=True)
