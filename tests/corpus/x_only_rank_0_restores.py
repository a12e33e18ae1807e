"""Only rank 0 reads the checkpoint; the weights reach the others by broadcast, moments do not."""

import bench
import torch
import torch.distributed as dist


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    if job.rank == 0:
        job.model.load_state_dict(ckpt["model"])
        job.optimizer.load_state_dict(ckpt["optimizer"])
    for tensor in job.model.state_dict().values():
        dist.broadcast(tensor, src=0)
    job.scheduler.load_state_dict(ckpt["scheduler"])
    for group, lr in zip(job.optimizer.param_groups, job.scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][job.rank])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
