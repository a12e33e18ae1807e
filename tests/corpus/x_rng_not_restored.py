"""The random state is saved and not put back."""

import bench
import torch


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
