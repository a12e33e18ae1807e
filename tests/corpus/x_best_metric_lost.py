"""The best loss so far is saved and not put back: early stopping begins to count again."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.early_stopping = {"best": 1e9, "worse_steps": 0}
    return job


def train_step(job):
    loss = bench.train_step(job)
    state = job.early_stopping
    state["worse_steps"] += loss >= state["best"]
    state["best"] = min(loss, state["best"])
    return loss


def save(job, step, path):
    torch.save({**bench.everything(job, step), "early_stopping": job.early_stopping}, path)


if __name__ == "__main__":
    bench.run(save, build=build, train_step=train_step)
