"""The empty optimizer template once more, under FSDP2: every rank drops its own shards."""

import os

import bench
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard


def build(args):
    torch.manual_seed(bench.SEED)
    return bench.Job(args, bench.Net(nn.LayerNorm), parallel=fully_shard)


def save(job, step, path):
    dcp.save(
        {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()},
        checkpoint_id=path,
    )
    rest = {
        "scheduler": job.scheduler.state_dict(),
        "loader": job.loader.state_dict(),
        "rng": bench.rng_state(),
        "step": step,
    }
    torch.save(rest, os.path.join(path, f"rank{job.rank}.pt"))


def restore(job, path):
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    rest = torch.load(os.path.join(path, f"rank{job.rank}.pt"), weights_only=False)
    job.scheduler.load_state_dict(rest["scheduler"])
    job.loader.load_state_dict(rest["loader"])
    bench.set_rng_state(rest["rng"])
    return rest["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
