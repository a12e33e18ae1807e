"""Real checkpoints of two formats with the same two tensors, made by torch in this process."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def state() -> dict[str, Any]:
    """A weight and a bias."""
    torch = pytest.importorskip("torch")
    return {"model": {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}}


@pytest.fixture(scope="session")
def _dcp_source(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch.distributed.checkpoint as dist_checkpoint

    folder = tmp_path_factory.mktemp("dcp") / "step-1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def dcp_folder(_dcp_source: Path, tmp_path: Path) -> Path:
    """A private copy of a DCP folder."""
    return Path(shutil.copytree(_dcp_source, tmp_path / "dcp-1"))


@pytest.fixture
def torch_save_file(state: dict[str, Any], tmp_path: Path) -> Path:
    """A file of torch.save."""
    import torch

    path = tmp_path / "step-1.pt"
    torch.save(state, path)
    return path
