"""Two loaders take turns, and only the one of this turn comes back."""

import bench
import torch
from h_two_loaders import build, train_step


def save(job, step, path):
    torch.save({**bench.everything(job, step), "turn": job.turn}, path)


def restore(job, path):
    step = bench.restore(job, path)
    job.turn = torch.load(path, weights_only=False)["turn"]
    job.loaders[(job.turn - 1) % 2] = job.loader
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
