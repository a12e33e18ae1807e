"""By which file each format says that a save has finished, and which saves never did.

One table over relative paths, the first row that fits wins. DeepSpeed, Accelerate and single files
of torch.save or safetensors write no such file: for them the manifest is the only commit there is.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath

# (files that tell the format, its commit marker), at the top of the checkpoint.
_MARKERS = (
    (("_CHECKPOINT_METADATA", "commit_success.txt"), "commit_success.txt"),  # Orbax, in a bucket
    (("_CHECKPOINT_METADATA",), "_CHECKPOINT_METADATA"),  # Orbax: holds the time of the commit
    ((".metadata", "metadata.json"), "metadata.json"),  # Megatron torch_dist
    ((".metadata", "meta.pt"), "meta.pt"),  # Lightning, sharded
    ((".metadata",), ".metadata"),  # DCP
    (("trainer_state.json",), "trainer_state.json"),  # Hugging Face Trainer
    (("model.safetensors.index.json",), "model.safetensors.index.json"),  # sharded safetensors
)
_DCP_MARKER = ".metadata"
# Names under which writers keep a save that has not finished.
_UNFINISHED = (".orbax-checkpoint-tmp", ".in-progress", ".publishing", ".tmp")


def marker_of(files: Collection[str]) -> str | None:
    """The commit marker among the relative paths of a checkpoint; None for a format without one.

    Where parts lie in folders of their own, each with a marker, it is that of the last by name.
    """
    for needed, marker in _MARKERS:
        if all(name in files for name in needed):
            return marker
    below = [path for path in files if PurePosixPath(path).name == _DCP_MARKER]
    return max(below, default=None)


def unfinished(name: str, files: Collection[str]) -> str | None:
    """Why a checkpoint called `name` was never committed by its writer; None if nothing says so."""
    if name.endswith(_UNFINISHED) or ".orbax-checkpoint-tmp" in name:
        return f"{name} is the name of a save in progress"
    for path in sorted(files):
        folder = PurePosixPath(path).parent
        if path.endswith(".distcp") and (folder / _DCP_MARKER).as_posix() not in files:
            return f"{path} is a DCP shard without {_DCP_MARKER} beside it"
    return None
