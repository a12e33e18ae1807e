"""Weights are pulled towards where they began; a resumed run takes where it resumes for that."""

import bench
import torch


def begin_here(job):
    job.anchor = [p.detach().clone() for p in job.model.parameters()]


def build(args):
    job = bench.Job(args)
    begin_here(job)
    return job


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    pairs = zip(job.model.parameters(), job.anchor, strict=True)
    pull = sum((p - a).square().sum() for p, a in pairs)
    loss = torch.nn.functional.cross_entropy(job.net(x), y) + 0.01 * pull
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def restore(job, path):
    step = bench.restore(job, path)
    begin_here(job)
    return step


if __name__ == "__main__":
    bench.run(restore=restore, build=build, train_step=train_step)
