"""A copy in memory of step 15 and one on disk of step 10: a rank that has to read the disk asks the
others for the step, but those that have their memory do not listen.
"""

import os

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.agree = torch.distributed.new_group(backend="gloo")
    return job


def tiers(root, rank):
    memory = os.path.join(root, "memory", f"rank{rank}.pt")
    return [memory, os.path.join(root, "disk", f"rank{rank}.pt")]


def save(job, step, path):
    memory, disk = tiers(os.path.join(job.args.out, "checkpoints"), job.rank)
    state = {
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scheduler": job.scheduler.state_dict(),
        "loader": job.loader.state_dict(),
        "rng": bench.rng_state(),
        "step": step,
    }
    file = memory if step % 10 else disk
    os.makedirs(os.path.dirname(file), exist_ok=True)
    if file == disk or job.rank == 0:  # the host of rank 1 is another one after the failure
        torch.save(state, file)


def choose(job, root):
    memory, disk = tiers(root, job.rank)
    if os.path.exists(memory):
        return memory
    steps = [None] * job.world
    torch.distributed.all_gather_object(steps, os.path.basename(disk), group=job.agree)
    return disk


def restore(job, root):
    ckpt = torch.load(choose(job, root), weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
