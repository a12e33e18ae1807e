"""Two optimizers write their state to one file, one after the other; both read the last."""

import os

import bench
import torch
from torch import nn


class Two:
    """Two optimizers over the two halves of the net, stepped together."""

    def __init__(self, model):
        first = [model.a.weight, model.a.bias]
        second = [model.b.weight, model.b.bias]
        rest = [p for n, p in model.named_parameters() if n.split(".")[0] in ("inp", "out")]
        self.all = [
            torch.optim.AdamW([{"params": params}], lr=1e-2) for params in (first, second, rest)
        ]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(bench.FEATURES, bench.WIDTH)
        self.a = nn.Linear(bench.WIDTH, bench.WIDTH)
        self.b = nn.Linear(bench.WIDTH, bench.WIDTH)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(bench.WIDTH, bench.CLASSES)

    def forward(self, x):
        h = torch.relu(self.a(torch.relu(self.inp(x))))
        return self.out(self.drop(torch.relu(self.b(h))))


def build(args):
    job = bench.Job(args, Net())
    job.optimizers = Two(job.model).all
    job.optimizer = job.optimizers[0]
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizers[0], bench.warmup_cosine())
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
    for number, optimizer in enumerate(job.optimizers):
        name = "optim.pt" if number < 2 else "optim_rest.pt"
        torch.save(optimizer.state_dict(), os.path.join(path, name))
    state = {
        "model": job.model.state_dict(),
        "scheduler": job.scheduler.state_dict(),
        "loader": job.loader.state_dict(),
        "rng": bench.rng_state(),
        "step": step,
    }
    torch.save(state, os.path.join(path, "state.pt"))


def restore(job, path):
    for number, optimizer in enumerate(job.optimizers):
        name = "optim.pt" if number < 2 else "optim_rest.pt"
        optimizer.load_state_dict(torch.load(os.path.join(path, name)))
    state = torch.load(os.path.join(path, "state.pt"), weights_only=False)
    job.model.load_state_dict(state["model"])
    job.scheduler.load_state_dict(state["scheduler"])
    job.optimizers[0].param_groups[0]["lr"] = job.scheduler.get_last_lr()[0]
    job.optimizers[0].param_groups[0]["initial_lr"] = 1e-2
    job.optimizers[1].param_groups[0]["lr"] = 1e-2
    job.loader.load_state_dict(state["loader"])
    bench.set_rng_state(state["rng"])
    return state["step"]


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
