"""The rate falls when the loss does not, and the scheduler that decides it comes back."""

import bench
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


def build(args):
    job = bench.Job(args)
    job.optimizer = torch.optim.AdamW(bench.groups(job.model), betas=(0.9, 0.95))
    job.scheduler = ReduceLROnPlateau(job.optimizer, patience=2)
    return job


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    loss = torch.nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step(loss.item())
    return loss.item()


if __name__ == "__main__":
    bench.run(build=build, train_step=train_step)
