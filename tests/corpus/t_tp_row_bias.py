"""Column- and row-parallel linear layers as modules, with biases; a file per rank."""

import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class ToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class FromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class ColumnParallelLinear(nn.Module):
    axes = {"weight": 0, "bias": 0}

    def __init__(self, i, o):
        super().__init__()
        w = torch.randn(o, i) / i**0.5
        self.weight, self.bias = (
            nn.Parameter(w.chunk(world)[rank].clone()),
            nn.Parameter(torch.zeros(o // world)),
        )

    def forward(self, x):
        return F.linear(ToTensorParallel.apply(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    axes = {"weight": 1}

    def __init__(self, i, o):
        super().__init__()
        w = torch.randn(o, i) / i**0.5
        self.weight, self.bias = (
            nn.Parameter(w.chunk(world, 1)[rank].clone()),
            nn.Parameter(0.1 * torch.randn(o)),
        )

    def forward(self, x):
        return FromTensorParallel.apply(F.linear(x, self.weight, self.bias))


class MLP(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.fc1, self.fc2 = ColumnParallelLinear(d, h), RowParallelLinear(h, d)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(x)))


torch.manual_seed(1)
net = nn.Sequential(nn.Linear(7, 12), MLP(12, 32), MLP(12, 32), nn.Linear(12, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
axes = {
    f"{m}.{k}": v for m, mod in net.named_modules() for k, v in getattr(mod, "axes", {}).items()
}
names = [n for n, _ in net.named_parameters()]
step = 0
if a.resume:
    shards = [torch.load(f) for f in sorted(glob.glob(f"{a.resume}/*.pt"))]

    def mine(n, key):
        parts = [s[key][n] for s in shards]
        return (
            torch.cat(parts, axes[n]).chunk(world, axes[n])[rank].clone() if n in axes else parts[0]
        )

    net.load_state_dict({n: mine(n, "net") for n in names})
    for n, q in net.named_parameters():
        opt.state[q]["momentum_buffer"] = mine(n, "momentum")
    step = shards[0]["step"]
g = torch.Generator().manual_seed(0)
x = torch.randn(32, 7, generator=g)
y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], 1)
while step < 10000:
    i = step % 4 * 8
    loss = F.mse_loss(net(x[i : i + 8]), y[i : i + 8])
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 0:
        os.makedirs(f"{a.out}/{step}", exist_ok=True)
        torch.save(
            dict(
                net=net.state_dict(),
                momentum={n: opt.state[q]["momentum_buffer"] for n, q in net.named_parameters()},
                step=step,
            ),
            f"{a.out}/{step}/tp{rank}.pt",
        )
        dist.barrier()
