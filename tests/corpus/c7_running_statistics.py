"""Parameters only are saved; the running statistics of the norm are lost, and training, which does
not read them, shows nothing.
"""

import bench
import torch


def save(job, step, path):
    state = bench.everything(job, step)
    parameters = {name: p.detach() for name, p in job.model.named_parameters()}
    torch.save({**state, "model": parameters}, path)


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
