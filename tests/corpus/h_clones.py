"""Tensors laid out like the weights that are no state: clones, updates, a sum for the log."""

import bench
import torch


def clones(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def build(args):
    job = bench.Job(args)
    job.way = [torch.zeros_like(p) for p in job.model.parameters()]
    job.steps = 0
    return job


def restore(job, path):
    step = bench.restore(job, path)
    job.start = clones(job.model)
    return step


def train_step(job):
    job.before = clones(job.model)
    loss = bench.train_step(job)
    job.updates = {n: p.detach() - job.before[n] for n, p in job.model.named_parameters()}
    torch._foreach_add_(job.way, [update.abs() for update in job.updates.values()])
    job.steps += 1
    if job.steps % 40 == 0:
        print("way", sum(way.sum().item() for way in job.way))
        torch._foreach_zero_(job.way)
    return loss


if __name__ == "__main__":
    bench.run(restore=restore, build=build, train_step=train_step)
