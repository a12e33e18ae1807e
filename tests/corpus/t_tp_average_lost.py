"""Tensor parallelism by hand, whose average of the weights begins anew after a resume.

The average is saved and not loaded. A mistake.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Sum(torch.autograd.Function):
    """Adds up over ranks forward, passes on backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        up, down = torch.randn(64, 8) / 3, torch.randn(3, 64) / 8
        self.up = nn.Parameter(up.chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return Sum.apply(torch.relu(Copy.apply(x) @ self.up.T) @ self.down.T) + self.bias


CUT = {"up": 0, "down": 1}
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=g), torch.randint(0, 3, (16,), generator=g)
names = [n for n, _ in net.named_parameters()]
average = {n: t.detach().clone() for n, t in net.named_parameters()}


def mine(n, t):
    return t.chunk(world, CUT[n])[rank].clone() if n in CUT and t.dim() else t


def whole(n, t):
    if n not in CUT or not t.dim():
        return t
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, CUT[n])


step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict({n: mine(n, t) for n, t in c["net"].items()})
    state = {i: {k: mine(n, v) for k, v in c["opt"][n].items()} for i, n in enumerate(names)}
    opt.load_state_dict(dict(state=state, param_groups=opt.state_dict()["param_groups"]))
    average = {n: t.detach().clone() for n, t in net.named_parameters()}
    step = c["step"]
while step < 10000:
    i = step % 4 * 4
    loss = nn.functional.cross_entropy(net(x[i : i + 4]), y[i : i + 4])
    opt.zero_grad()
    loss.backward()
    opt.step()
    for n, t in net.named_parameters():
        average[n].mul_(0.9).add_(t.detach(), alpha=0.1)
    step += 1
    if step % 4 == 2:
        state = opt.state_dict()["state"]
        saved = dict(
            net={n: whole(n, t.detach()) for n, t in net.named_parameters()},
            average={n: whole(n, t) for n, t in average.items()},
            step=step,
            opt={n: {k: whole(n, v) for k, v in state[i].items()} for i, n in enumerate(names)},
        )
        if rank == 0:
            os.makedirs(a.out, exist_ok=True)
            torch.save(saved, f"{a.out}/{step}.pt")
