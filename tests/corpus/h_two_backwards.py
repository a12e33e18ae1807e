"""Two nets, two losses, two optimizers: each has its own backward call and its own batch in every
step, as in adversarial training. One switch away, the second optimizer is not put back.
"""

import os

import bench
import torch
from torch import nn


def options(parser):
    parser.add_argument(
        "--first-only", action="store_true", help="restore the first optimizer alone"
    )


def net():
    hidden = nn.Linear(bench.FEATURES, bench.WIDTH)
    return nn.Sequential(hidden, nn.Dropout(0.1), nn.ReLU(), nn.Linear(bench.WIDTH, bench.CLASSES))


def build(args):
    job = bench.Job(args, nn.ModuleDict({"critic": net(), "actor": net()}))
    job.optimizers = {
        "critic": torch.optim.AdamW(job.model["critic"].parameters(), lr=1e-2),
        "actor": torch.optim.AdamW(job.model["actor"].parameters(), lr=5e-3),
    }
    job.optimizer = job.optimizers["critic"]
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, bench.warmup_cosine())
    job.first_only = args.first_only
    return job


def train_step(job):
    total = 0.0
    for name, optimizer in job.optimizers.items():
        x, y = bench.samples(job.loader.next_ids())
        loss = nn.functional.cross_entropy(job.model[name](x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    job.scheduler.step()
    return total


def save(job, step, path):
    os.makedirs(path)
    state = {
        "model": job.model.state_dict(),
        "optimizers": {name: each.state_dict() for name, each in job.optimizers.items()},
        "scheduler": job.scheduler.state_dict(),
        "loader": job.loader.state_dict(),
        "rng": bench.rng_state(),
        "step": step,
    }
    torch.save(state, os.path.join(path, "state.pt"))


def restore(job, path):
    state = torch.load(os.path.join(path, "state.pt"), weights_only=False)
    job.model.load_state_dict(state["model"])
    for name, optimizer in job.optimizers.items():
        if name == "critic" or not job.first_only:
            optimizer.load_state_dict(state["optimizers"][name])
    job.scheduler.load_state_dict(state["scheduler"])
    job.loader.load_state_dict(state["loader"])
    bench.set_rng_state(state["rng"])
    return state["step"]


if __name__ == "__main__":
    bench.run(save, restore, build, train_step, options)
