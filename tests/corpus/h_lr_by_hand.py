"""The learning rate is computed from the step, without a scheduler object."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.scheduler = None
    job.done = 0
    return job


def train_step(job):
    factor = bench.warmup_cosine()(job.done)
    for group, lr in zip(
        job.optimizer.param_groups, (bench.LR_MATRICES, bench.LR_VECTORS), strict=True
    ):
        group["lr"] = lr * factor
    x, y = bench.samples(job.loader.next_ids())
    loss = torch.nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.done += 1
    return loss.item()


def save(job, step, path):
    state = {
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "loader": job.loader.state_dict(),
        "rng": bench.rng_state(),
        "step": step,
    }
    torch.save(state, path)


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"])
    job.done = ckpt["step"]
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
