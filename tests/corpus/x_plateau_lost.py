"""The rate falls when the loss does not; the lowest loss so far is not put back."""

import bench
import torch
from h_plateau import build, train_step


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore, build=build, train_step=train_step)
