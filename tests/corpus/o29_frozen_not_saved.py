"""Only what is trained is saved: the frozen layer of a new process is another random one."""

import bench
import torch


def build(args):
    model = bench.Net()
    model.mid.requires_grad_(False)
    return bench.Job(args, model)


def save(job, step, path):
    state = bench.everything(job, step)
    frozen = {name for name, p in job.model.named_parameters() if not p.requires_grad}
    trained = {name: value for name, value in state["model"].items() if name not in frozen}
    torch.save({**state, "model": trained}, path)


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"], strict=False)
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
