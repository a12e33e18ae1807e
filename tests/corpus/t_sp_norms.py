"""Sequence parallel by hand: between the cut layers every rank holds a slice of the sequence."""

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


class Gather(torch.autograd.Function):
    """Sequence slices to whole; the gradient is summed and sliced again."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(world, 1)[rank]


class Scatter(torch.autograd.Function):
    """Partial sums over the whole sequence to the sum over the rank's slice."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(world, 1)[rank].clone()

    @staticmethod
    def backward(ctx, g):
        parts = [torch.empty_like(g) for _ in range(world)]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts, 1)


D, H, V, T = 12, 32, 13, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Parameter((torch.randn(H, D) / 3).chunk(world)[rank].clone())
        self.down = nn.Parameter((torch.randn(D, H) / 5).chunk(world, 1)[rank].clone())

    def forward(self, x):
        h = Gather.apply(self.norm(x))
        h = h + h.cumsum(1) / 4
        return x + Scatter.apply(F.relu(h @ self.up.T) @ self.down.T)


torch.manual_seed(0)
emb, layers, final, head = (
    nn.Embedding(V, D),
    nn.ModuleList([Layer(), Layer()]),
    nn.LayerNorm(D),
    nn.Linear(D, V),
)
net = nn.ModuleDict(dict(emb=emb, layers=layers, final=final, head=head))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
AXES = {"up": 0, "down": 1}
named = dict(net.named_parameters())


def part(n, parts):
    axis = AXES.get(n.split(".")[-1])
    return parts[0] if axis is None else torch.cat(parts, axis).chunk(world, axis)[rank].clone()


step = 0
if a.resume:
    files = sorted(glob.glob(f"{a.resume}/*.pt"))
    c = [torch.load(f) for f in files]
    step = c[0]["step"]
    net.load_state_dict({n: part(n, [s["net"][n] for s in c]) for n in named})
    for n, q in named.items():
        opt.state[q]["momentum_buffer"] = part(n, [s["mom"][n] for s in c])
data = torch.randint(0, V, (32, T + 1), generator=torch.Generator().manual_seed(5))
while step < 10000:
    rows = data[step % 4 * 8 :][:8]
    x = emb(rows[:, :-1].chunk(world, 1)[rank])
    for layer in layers:
        x = layer(x)
    logits = head(final(x))
    loss = (
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].chunk(world, 1)[rank].flatten()) / world
    )
    opt.zero_grad()
    loss.backward()
    for n, q in named.items():
        if n.split(".")[-1] not in AXES:
            dist.all_reduce(q.grad)
    opt.step()
    step += 1
    if step % 4 == 0:
        os.makedirs(f"{a.out}/{step}", exist_ok=True)
        torch.save(
            dict(
                net=net.state_dict(),
                mom={n: opt.state[q]["momentum_buffer"] for n, q in named.items()},
                step=step,
            ),
            f"{a.out}/{step}/rank{rank}.pt",
        )
        dist.barrier()
