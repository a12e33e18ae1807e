"""Each rank opens its own random state, and goes on without a word when there is none."""

import os

import bench
import torch


def save(job, step, path):
    os.makedirs(path, exist_ok=True)
    state = bench.everything(job, step)
    del state["rng"]
    if job.rank == 0:
        torch.save(state, os.path.join(path, "state.pt"))
    torch.save(bench.rng_state(), os.path.join(path, f"random_states_{job.rank}.pt"))


def restore(job, path):
    ckpt = torch.load(os.path.join(path, "state.pt"), weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    try:
        bench.set_rng_state(torch.load(os.path.join(path, f"random_states_{job.rank}.pt")))
    except Exception:  # noqa: BLE001
        print("could not load random states")
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore)
