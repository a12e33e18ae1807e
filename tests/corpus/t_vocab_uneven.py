"""Vocabulary-parallel embedding and cross entropy by hand.

The vocabulary is cut as evenly as it goes. One file of whole tensors.
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


V, D = 19, 12
BOUNDS = [i * (V // world) + min(i, V % world) for i in range(world + 1)]
LO, HI = BOUNDS[rank], BOUNDS[rank + 1]


class VocabEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, D)[LO:HI].clone())

    def forward(self, ids):
        here = (ids >= LO) & (ids < HI)
        x = self.weight[(ids - LO).clamp(0, HI - LO - 1)] * here[..., None]
        return FromTensorParallel.apply(x)


class VocabHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(V, D) / 4)[LO:HI].clone())

    def forward(self, x, target):
        logits = F.linear(ToTensorParallel.apply(x), self.weight)
        top = logits.detach().amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        z = FromTensorParallel.apply((logits - top[:, None]).exp().sum(-1)).log() + top
        here = (target >= LO) & (target < HI)
        hit = logits.gather(1, (target - LO).clamp(0, HI - LO - 1)[:, None])[:, 0] * here
        return (z - FromTensorParallel.apply(hit)).mean()


torch.manual_seed(0)
emb, mid, head = (
    VocabEmbedding(),
    nn.Sequential(nn.Linear(D, 20), nn.GELU(), nn.Linear(20, D)),
    VocabHead(),
)
net = nn.ModuleDict({"emb": emb, "mid": mid, "head": head})
opt = torch.optim.AdamW(net.parameters(), lr=0.004)
names = [n for n, _ in net.named_parameters()]
CUT = {"emb.weight", "head.weight"}


def whole(n, t):
    if n not in CUT or not t.dim():
        return t.clone()
    parts = [t.new_empty(BOUNDS[r + 1] - BOUNDS[r], D) for r in range(world)]
    dist.all_gather(parts, t.contiguous()) if V % world == 0 else [
        dist.broadcast(q.copy_(t) if r == rank else q, r) for r, q in enumerate(parts)
    ]
    return torch.cat(parts)


def mine(n, t):
    if n not in CUT or not t.dim():
        return t
    return t[LO:HI].clone()


step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict({n: mine(n, t) for n, t in c["net"].items()})
    sd = opt.state_dict()
    sd["state"] = {i: {k: mine(n, t) for k, t in c["opt"][n].items()} for i, n in enumerate(names)}
    opt.load_state_dict(sd)
    step = c["step"]
data = torch.randint(0, V, (40, 9), generator=torch.Generator().manual_seed(1))
while step < 10000:
    rows = data[step % 5 * 8 :][:8]
    x = emb(rows[:, :-1])
    loss = head((x + mid(x)).flatten(0, 1), rows[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 0:
        st = opt.state_dict()["state"]
        c = dict(
            net={n: whole(n, t) for n, t in net.state_dict().items()},
            opt={n: {k: whole(n, t) for k, t in st[i].items()} for i, n in enumerate(names)},
            step=step,
        )
        if rank == 0:
            os.makedirs(a.out, exist_ok=True)
            torch.save(c, f"{a.out}/{step}.pt")
