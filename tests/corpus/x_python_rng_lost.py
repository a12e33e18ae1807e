"""The augmentation draws from Python's random, whose state is not saved."""

import random

import bench
import torch


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    y = y if random.random() < 0.8 else y.flip(0)  # some labels are wrong on purpose
    loss = torch.nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    torch.set_rng_state(ckpt["rng"][0]["torch"])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore, train_step=train_step)
