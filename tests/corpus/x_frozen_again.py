"""The lower layer is freed at step 8, by an event that a run resumed later never meets."""

import bench
from h_freezing import FREE_FROM, build


def train_step(job):
    loss = bench.train_step(job)
    job.done += 1
    if job.done == FREE_FROM:
        job.model.inp.requires_grad_(True)
    return loss


def restore(job, path):
    job.done = bench.restore(job, path)
    return job.done


if __name__ == "__main__":
    bench.run(restore=restore, build=build, train_step=train_step)
