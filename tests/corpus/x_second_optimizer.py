"""Two optimizers step after one backward call; one switch away, the second is not put back."""

import os

import bench
import torch
from torch import nn


def options(parser):
    parser.add_argument(
        "--first-only", action="store_true", help="restore the first optimizer alone"
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(bench.FEATURES, bench.WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(bench.WIDTH, bench.CLASSES)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.body(x))))


def build(args):
    job = bench.Job(args, Net())
    job.optimizers = [
        torch.optim.AdamW(job.model.body.parameters(), lr=1e-2),
        torch.optim.SGD(job.model.head.parameters(), lr=1e-2, momentum=0.9),
    ]
    job.optimizer = job.optimizers[0]
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, bench.warmup_cosine())
    job.first_only = args.first_only
    return job


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    loss = nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    for optimizer in job.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def save(job, step, path):
    os.makedirs(path)
    state = {
        "model": job.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in job.optimizers],
        "scheduler": job.scheduler.state_dict(),
        "loader": job.loader.state_dict(),
        "rng": bench.rng_state(),
        "step": step,
    }
    torch.save(state, os.path.join(path, "state.pt"))


def restore(job, path):
    state = torch.load(os.path.join(path, "state.pt"), weights_only=False)
    job.model.load_state_dict(state["model"])
    restored = job.optimizers[:1] if job.first_only else job.optimizers
    for optimizer, held in zip(restored, state["optimizers"], strict=False):
        optimizer.load_state_dict(held)
    job.scheduler.load_state_dict(state["scheduler"])
    job.loader.load_state_dict(state["loader"])
    bench.set_rng_state(state["rng"])
    return state["step"]


if __name__ == "__main__":
    bench.run(save, restore, build, train_step, options)
