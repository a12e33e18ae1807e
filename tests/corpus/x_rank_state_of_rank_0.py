"""Each rank has a temperature of its own, and rank 0 saves its own for all."""

import bench
import torch
from h_rank_losses import build, train_step


def save(job, step, path):
    state = bench.everything(job, step)
    if job.rank == 0:
        torch.save({**state, "temperature": job.temperature}, path)


def restore(job, path):
    step = bench.restore(job, path)
    job.temperature = torch.load(path, weights_only=False)["temperature"]
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
