"""The optimizer is written under one name and looked for under another; a file that is not there is
passed over.
"""

import os

import bench
import torch


def save(job, step, path):
    os.makedirs(path)
    state = bench.everything(job, step)
    torch.save(state.pop("optimizer"), os.path.join(path, "optimizer.bin"))
    torch.save(state, os.path.join(path, "state.pt"))


def restore(job, path):
    ckpt = torch.load(os.path.join(path, "state.pt"), weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    if os.path.exists(os.path.join(path, "optimizer.pt")):
        job.optimizer.load_state_dict(torch.load(os.path.join(path, "optimizer.pt")))
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore)
