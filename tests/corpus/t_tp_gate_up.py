"""A gated feed-forward layer cut by hand; gate and up are one matrix. One file of whole tensors."""

import argparse
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


WIDTH, HIDDEN = 10, 24


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        gate, up, down = (
            torch.randn(HIDDEN, WIDTH) / 3,
            torch.randn(HIDDEN, WIDTH) / 3,
            torch.randn(WIDTH, HIDDEN) / 5,
        )
        self.gate_up = nn.Parameter(torch.cat([gate.chunk(world)[rank], up.chunk(world)[rank]]))
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())

    def forward(self, x):
        gate, up = F.linear(ToTensorParallel.apply(x), self.gate_up).chunk(2, -1)
        return x + FromTensorParallel.apply(F.linear(F.silu(gate) * up, self.down))


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, WIDTH), SwiGLU(), SwiGLU(), nn.Linear(WIDTH, 4))
opt = torch.optim.AdamW(net.parameters(), lr=0.005)
names = [n for n, _ in net.named_parameters()]


def axis(name):
    return {"gate_up": 0, "down": 1}.get(name.split(".")[-1])


def gather(name, t):
    if axis(name) is None or not t.dim():
        return t.clone()
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, axis(name))


def scatter(name, t):
    if axis(name) is None or not t.dim():
        return t
    return t.chunk(world, axis(name))[rank].clone()


step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict({n: scatter(n, t) for n, t in c["net"].items()})
    sd = opt.state_dict()
    sd["state"] = {
        i: {k: scatter(n, t) for k, t in c["opt"][n].items()} for i, n in enumerate(names)
    }
    opt.load_state_dict(sd)
    step = c["step"]
g = torch.Generator().manual_seed(0)
x, y = torch.randn(30, 6, generator=g), torch.randint(0, 4, (30,), generator=g)
while step < 10000:
    rows = torch.arange(step * 10, step * 10 + 10) % 30
    loss = F.cross_entropy(net(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 0:
        state = opt.state_dict()["state"]
        c = dict(
            net={n: gather(n, t) for n, t in net.state_dict().items()},
            opt={n: {k: gather(n, t) for k, t in state[i].items()} for i, n in enumerate(names)},
            step=step,
        )
        if rank == 0:
            os.makedirs(a.out, exist_ok=True)
            torch.save(c, f"{a.out}/{step}.pt")
