"""The resumed loop skips as many batches as there were optimizer steps: half, with accumulation."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.micro_batches = 2
    return job


def save(job, step, path):
    state = bench.everything(job, step)
    del state["loader"]
    torch.save(state, path)


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    for _ in range(ckpt["step"]):
        job.loader.next_ids()
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
