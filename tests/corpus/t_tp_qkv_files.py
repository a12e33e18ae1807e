"""Attention cut over heads by hand, with a fused qkv; a file per rank, merged when read.

Fused rows taken apart first.
"""

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


DIM, HEADS, VOCAB = 16, 4, 15


def cut_qkv(w, n, i):
    """Rows of a whole [q; k; v] for part i of n."""
    return torch.cat([part.chunk(n)[i] for part in w.chunk(3)])


def join_qkv(parts):
    return torch.cat([torch.cat(z) for z in zip(*(w.chunk(3) for w in parts))])


CUT = {
    "qkv": (cut_qkv, join_qkv),
    "proj": (lambda w, n, i: w.chunk(n, 1)[i], lambda parts: torch.cat(parts, 1)),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Parameter(torch.randn(VOCAB, DIM) / 2)
        self.qkv = nn.Parameter(cut_qkv(torch.randn(3 * DIM, DIM) / 4, world, rank).clone())
        self.proj = nn.Parameter((torch.randn(DIM, DIM) / 4).chunk(world, 1)[rank].clone())
        self.head = nn.Parameter(torch.randn(VOCAB, DIM) / 4)

    def forward(self, ids):
        x = self.emb[ids]
        b, t, _ = x.shape
        q, k, v = (
            z.view(b, t, HEADS // world, -1).transpose(1, 2)
            for z in F.linear(ToTensorParallel.apply(x), self.qkv).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.linear(x + FromTensorParallel.apply(F.linear(y, self.proj)), self.head)


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
names = [n for n, _ in model.named_parameters()]


def load(folder):
    files = sorted(glob.glob(f"{folder}/mp_rank_*.pt"))
    shards = [torch.load(f) for f in files]

    def part(name, values):
        if name not in CUT:
            return values[0]
        cut, join = CUT[name]
        return cut(join(values), world, rank).clone()

    model.load_state_dict({n: part(n, [s["model"][n] for s in shards]) for n in names})
    state = optimizer.state_dict()
    for i, n in enumerate(names):
        state["state"][i] = {
            k: shards[0]["optim"][n][k]
            if k == "step"
            else part(n, [s["optim"][n][k] for s in shards])
            for k in ("step", "exp_avg", "exp_avg_sq")
        }
    optimizer.load_state_dict(state)
    return shards[0]["iteration"]


iteration = load(a.resume) if a.resume else 0
data = torch.randint(0, VOCAB, (32, 9), generator=torch.Generator().manual_seed(7))
while iteration < 10000:
    ids = data[iteration % 4 * 8 :][:8]
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    iteration += 1
    if iteration % 4 == 0:
        folder = f"{a.out}/iter_{iteration:07d}"
        os.makedirs(folder, exist_ok=True)
        state = optimizer.state_dict()["state"]
        torch.save(
            {
                "model": model.state_dict(),
                "optim": {n: state[i] for i, n in enumerate(names)},
                "iteration": iteration,
            },
            f"{folder}/mp_rank_{rank:02d}.pt",
        )
        dist.barrier()
