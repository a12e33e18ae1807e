"""The compiled model's keys carry a prefix; the load is not strict and nobody reads its result."""

import bench
import torch


class Compiled(torch.nn.Module):
    """As torch.compile leaves a model: the original one below `_orig_mod`."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def forward(self, x):
        return self._orig_mod(x)


def save(job, step, path):
    state = bench.everything(job, step)
    torch.save({**state, "model": Compiled(job.model).state_dict()}, path)


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"], strict=False)
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore)
