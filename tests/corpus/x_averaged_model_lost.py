"""An AveragedModel is saved and not put back: its count and its weights begin anew."""

import bench
import torch
from torch.optim.swa_utils import AveragedModel


def build(args):
    job = bench.Job(args)
    job.averaged = AveragedModel(job.model)
    return job


def train_step(job):
    loss = bench.train_step(job)
    job.averaged.update_parameters(job.model)
    return loss


def save(job, step, path):
    state = {**bench.everything(job, step), "averaged": job.averaged.state_dict()}
    torch.save(state, path)


if __name__ == "__main__":
    bench.run(save, build=build, train_step=train_step)
