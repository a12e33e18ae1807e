"""After the restore the learning rate of every group is set to the configured one again."""

import bench
import torch


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    configured = [group["lr"] for group in job.optimizer.param_groups]
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    for group, lr in zip(job.optimizer.param_groups, configured, strict=True):
        group["lr"] = lr
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
