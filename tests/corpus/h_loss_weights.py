"""Two losses, weighted by how fast each of them falls; the weights come back."""

import bench
import torch
from torch import nn


def build(args):
    job = bench.Job(args)
    job.weights = {"class": 1.0, "size": 1.0}
    job.lowest = dict.fromkeys(job.weights, float("inf"))
    return job


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    out = job.net(x)
    parts = {"class": nn.functional.cross_entropy(out, y), "size": out.square().mean()}
    loss = sum(job.weights[name] * part for name, part in parts.items())
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    for name, part in parts.items():
        falls = part.item() < job.lowest[name]
        job.lowest[name] = min(job.lowest[name], part.item())
        job.weights[name] *= 0.97 if falls else 1.03
    return loss.item()


def save(job, step, path):
    own = {"weights": job.weights, "lowest": job.lowest}
    torch.save({**bench.everything(job, step), "losses": own}, path)


def restore(job, path):
    step = bench.restore(job, path)
    own = torch.load(path, weights_only=False)["losses"]
    job.weights, job.lowest = own["weights"], own["lowest"]
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
