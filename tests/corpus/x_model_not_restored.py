"""The weights are loaded into a copy of the model that is not the one trained."""

import copy

import bench
import torch


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    model = copy.deepcopy(job.model)
    model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][job.rank])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
