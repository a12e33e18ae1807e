"""The lower layer is frozen for the first steps, and whether it still is follows from the step."""

import bench
from torch import nn

FREE_FROM = 8


def apply(job):
    for parameter in job.model.inp.parameters():
        parameter.requires_grad_(job.done >= FREE_FROM)


def build(args):
    job = bench.Job(args, bench.Net(nn.LayerNorm))
    job.done = 0
    apply(job)
    return job


def train_step(job):
    loss = bench.train_step(job)
    job.done += 1
    apply(job)
    return loss


def restore(job, path):
    job.done = bench.restore(job, path)
    apply(job)
    return job.done


if __name__ == "__main__":
    bench.run(restore=restore, build=build, train_step=train_step)
