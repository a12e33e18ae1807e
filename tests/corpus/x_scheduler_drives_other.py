"""The optimizer is made anew for the load; the schedule goes on driving the one before."""

import bench
import torch


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer = torch.optim.AdamW(bench.groups(job.model), betas=(0.9, 0.95))
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][job.rank])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
