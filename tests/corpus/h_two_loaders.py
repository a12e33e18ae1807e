"""Two loaders take turns, and both come back."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.loaders = [bench.Loader(), bench.Loader()]
    job.loaders[1].seed = 100
    job.turn = 0
    return job


def train_step(job):
    job.loader = job.loaders[job.turn % 2]
    job.turn += 1
    return bench.train_step(job)


def save(job, step, path):
    loaders = [loader.state_dict() for loader in job.loaders]
    torch.save({**bench.everything(job, step), "loaders": loaders, "turn": job.turn}, path)


def restore(job, path):
    step = bench.restore(job, path)
    ckpt = torch.load(path, weights_only=False)
    for loader, state in zip(job.loaders, ckpt["loaders"], strict=True):
        loader.load_state_dict(state)
    job.turn = ckpt["turn"]
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
