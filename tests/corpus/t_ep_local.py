"""Experts stacked in one tensor per rank, under local names; router and head are replicated.

A file per rank.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
p.add_argument("--ep", type=int, default=0, help="ranks that share the experts; default: all")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
EP = a.ep or world
EXPERTS, D = 4, 8
LOCAL = EXPERTS // EP
for i in range(0, world, EP):
    g = dist.new_group(list(range(i, i + EP)))
    if i <= rank < i + EP:
        ep_group = g
for i in range(EP):
    g = dist.new_group(list(range(i, world, EP)))
    if rank % EP == i:
        same_experts = g
me = rank % EP


class Collect(torch.autograd.Function):
    """Tokens of all ranks that share the experts."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(EP)]
        dist.all_gather(parts, x.contiguous(), group=ep_group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ep_group)
        return grad.chunk(EP)[me].clone()


class Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=ep_group)
        return x.chunk(EP)[me].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(EP)]
        dist.all_gather(parts, grad.contiguous(), group=ep_group)
        return torch.cat(parts)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = torch.randn(EXPERTS, D, 12) / 3, torch.randn(EXPERTS, 12, D) / 4
        self.up, self.down = (
            nn.Parameter(up[me * LOCAL : (me + 1) * LOCAL].clone()),
            nn.Parameter(down[me * LOCAL : (me + 1) * LOCAL].clone()),
        )

    def forward(self, x, weight):
        h = torch.relu(torch.einsum("nd,edh->enh", x, self.up))
        return torch.einsum(
            "enh,ehd,ne->nd", h, self.down, weight[:, me * LOCAL : (me + 1) * LOCAL]
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.router, self.experts, self.head = (
            nn.Linear(6, D),
            nn.Linear(D, EXPERTS),
            Experts(),
            nn.Linear(D, 4),
        )

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        gate = torch.softmax(self.router(x), -1)
        gate = gate * (gate >= gate.topk(2, -1).values[:, -1:])
        return self.head(x + Return.apply(self.experts(Collect.apply(x), Collect.apply(gate))))


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.006)
names = [n for n, _ in net.named_parameters()]


def restore(folder):
    old = len(os.listdir(folder))
    files = [torch.load(f"{folder}/rank_{r}.pt") for r in range(old)]

    def find(take, n, dims):
        if not n.startswith("experts") or not dims:
            return take(files[0])
        each = EXPERTS // old
        where = [(e // each, e % each) for e in range(me * LOCAL, (me + 1) * LOCAL)]
        return torch.stack([take(files[r])[i] for r, i in where])

    net.load_state_dict({n: find(lambda c: c["model"][n], n, 1) for n in names})
    sd = opt.state_dict()
    sd["state"] = {
        i: {
            k: find(lambda c: c["optimizer"][n][k], n, v.dim())
            for k, v in files[0]["optimizer"][n].items()
        }
        for i, n in enumerate(names)
    }
    opt.load_state_dict(sd)
    return files[0]["step"]


step = restore(a.resume) if a.resume else 0
g = torch.Generator().manual_seed(2)
x, y = torch.randn(64, 6, generator=g), torch.randint(0, 4, (64,), generator=g)
while step < 10000:
    rows = [(step * 16 + k) % 64 for k in range(rank, 16, world)]
    opt.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    for n, q in net.named_parameters():
        dist.all_reduce(q.grad, group=same_experts if n.startswith("experts") else dist.group.WORLD)
        q.grad /= world
    opt.step()
    step += 1
    if step % 4 == 0:
        os.makedirs(f"{a.out}/{step}", exist_ok=True)
        state = opt.state_dict()["state"]
        torch.save(
            {
                "model": net.state_dict(),
                "optimizer": {n: state[i] for i, n in enumerate(names)},
                "step": step,
            },
            f"{a.out}/{step}/rank_{rank}.pt",
        )
        dist.barrier()
