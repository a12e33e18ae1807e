"""Gradients are clipped at the mean of the last norms, which are in no checkpoint. An average of
the weights is saved and put back: it differs by the next save, as all that follows from updates.
"""

import bench
import torch
from torch import nn


def build(args):
    job = bench.Job(args)
    job.norms = []
    job.average = {name: value.clone() for name, value in job.model.state_dict().items()}
    return job


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    loss = nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    limit = sum(job.norms) / len(job.norms) / 2 if job.norms else 1.0
    norm = nn.utils.clip_grad_norm_(job.model.parameters(), limit)
    job.norms = [*job.norms[-7:], norm.item()]
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    for name, value in job.model.state_dict().items():
        if value.is_floating_point():
            job.average[name].lerp_(value, 0.1)
    return loss.item()


def save(job, step, path):
    torch.save({**bench.everything(job, step), "average": job.average}, path)


def restore(job, path):
    step = bench.restore(job, path)
    job.average = torch.load(path, weights_only=False)["average"]
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
