"""A model under torch.compile, whose prefix is taken off in the load."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.net = torch.compile(job.model, backend="eager")
    return job


def save(job, step, path):
    torch.save({**bench.everything(job, step), "model": job.net.state_dict()}, path)


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    names = {key.removeprefix("_orig_mod."): value for key, value in ckpt["model"].items()}
    job.model.load_state_dict(names)
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
