"""A OneCycleLR is made after the optimizer is loaded: it writes the rates of its beginning."""

import bench
import torch
from torch.optim.lr_scheduler import OneCycleLR


def cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=[bench.LR_MATRICES, bench.LR_VECTORS], total_steps=40)


def build(args):
    job = bench.Job(args)
    job.optimizer = torch.optim.AdamW(bench.groups(job.model), betas=(0.9, 0.95))
    job.scheduler = cycle(job.optimizer)
    return job


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler = cycle(job.optimizer)
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore, build=build)
