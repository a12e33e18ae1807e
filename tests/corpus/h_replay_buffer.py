"""Half of each batch is drawn from what was trained on before, and the buffer comes back."""

import random
from collections import deque

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.replay = deque(maxlen=32)
    return job


def train_step(job):
    fresh = job.loader.next_ids()
    old = random.sample(list(job.replay), 2) if len(job.replay) > 8 else []
    job.replay.extend(fresh)
    x, y = bench.samples([*fresh, *old])
    loss = torch.nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def save(job, step, path):
    torch.save({**bench.everything(job, step), "replay": list(job.replay)}, path)


def restore(job, path):
    step = bench.restore(job, path)
    job.replay.extend(torch.load(path, weights_only=False)["replay"])
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
