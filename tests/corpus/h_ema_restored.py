"""The averaged weights in a plain dict are saved and put back."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.ema = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    return job


def train_step(job):
    loss = bench.train_step(job)
    with torch.no_grad():
        for name, p in job.model.named_parameters():
            job.ema[name].lerp_(p, 0.1)
    return loss


def save(job, step, path):
    torch.save({**bench.everything(job, step), "ema": job.ema}, path)


def restore(job, path):
    step = bench.restore(job, path)
    job.ema = torch.load(path, weights_only=False)["ema"]
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
