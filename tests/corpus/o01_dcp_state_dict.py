"""The same checkpoint read as DCP means it: `get_state_dict` makes the optimizer state first."""

import os

import bench
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(job, step, path):
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    rest = {
        "scheduler": job.scheduler.state_dict(),
        "loader": job.loader.state_dict(),
        "rng": bench.rng_state(),
        "step": step,
    }
    torch.save(rest, os.path.join(path, "rest.pt"))


def restore(job, path):
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    rest = torch.load(os.path.join(path, "rest.pt"), weights_only=False)
    job.scheduler.load_state_dict(rest["scheduler"])
    job.loader.load_state_dict(rest["loader"])
    bench.set_rng_state(rest["rng"])
    return rest["step"]


if __name__ == "__main__":
    bench.run(save, restore)
