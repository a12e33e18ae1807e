"""After the restore the betas are those of AdamW's constructor, not those of the run."""

import bench
import torch


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    for group in job.optimizer.param_groups:
        group["betas"] = job.optimizer.__class__([torch.zeros(1)]).defaults["betas"]
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
