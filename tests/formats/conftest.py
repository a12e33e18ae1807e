"""Real checkpoints for the format readers, made by torch in this process."""

import warnings
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def state() -> dict[str, Any]:
    """A model and its AdamW after one step, as jobs save them."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}


@pytest.fixture(scope="session")
def dcp_source(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP folder of `state`; tests that write copy it first."""
    import torch.distributed.checkpoint as dist_checkpoint

    folder = tmp_path_factory.mktemp("dcp") / "step-1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="session")
def torch_save_source(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch.save file of `state`."""
    import torch

    path = tmp_path_factory.mktemp("torch_save") / "step-1.pt"
    torch.save(state, path)
    return path
