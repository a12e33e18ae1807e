"""ZeRO by hand: each rank keeps the momentum of its piece, and no optimizer class is in use.

Healthy; but a step that is no optimizer's is not seen.
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
torch.manual_seed(0)
net = nn.Linear(8, 3)
weights = list(net.parameters())
sizes = [w.numel() for w in weights]
piece = -(-sum(sizes) // world)
padding = torch.zeros(piece * world - sum(sizes))
flat = torch.cat([w.detach().flatten() for w in weights] + [padding])
momentum = torch.zeros(piece)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(32, 8, generator=g), torch.randint(0, 3, (32,), generator=g)
step = 0
if a.resume:
    c = torch.load(a.resume)
    flat = torch.cat([c["flat"], padding])
    momentum = torch.cat([c["momentum"], padding]).chunk(world)[rank].clone()
    step = c["step"]


def gathered(part):
    pieces = [torch.empty(piece) for _ in range(world)]
    dist.all_gather(pieces, part)
    return torch.cat(pieces)


while step < 100:
    for w, values in zip(weights, flat[: sum(sizes)].split(sizes)):
        w.data.copy_(values.view_as(w))
        w.grad = None
    rows = slice(step % 4 * 8, step % 4 * 8 + 8)
    nn.functional.cross_entropy(net(x[rows][rank::world]), y[rows][rank::world]).backward()
    gradient = torch.cat([w.grad.flatten() for w in weights] + [padding])
    dist.all_reduce(gradient)
    momentum.mul_(0.9).add_(gradient.chunk(world)[rank] / world)
    flat = gathered(flat.chunk(world)[rank] - 0.05 * momentum)
    step += 1
    if step % 4 == 2:
        whole = gathered(momentum)[: sum(sizes)]
        if rank == 0:
            os.makedirs(a.out, exist_ok=True)
            saved = {"flat": flat[: sum(sizes)].clone(), "momentum": whole.clone(), "step": step}
            torch.save(saved, f"{a.out}/step-{step}")
dist.destroy_process_group()
