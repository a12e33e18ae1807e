"""DDP with dropout; every rank has its own random stream.

Healthy; --sum makes a sum of the mean.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
p.add_argument("--sum", action="store_true")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(32, 8, generator=g), torch.randint(0, 3, (32,), generator=g)
step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    step = c["step"]
    torch.manual_seed(100 + rank)
    if rank < len(c["rng"]):
        torch.set_rng_state(c["rng"][rank])
while step < 10000:
    rows = slice(step % 4 * 8, step % 4 * 8 + 8)
    loss = nn.functional.cross_entropy(net(x[rows][rank::world]), y[rows][rank::world])
    opt.zero_grad()
    loss.backward()
    for q in net.parameters():
        dist.all_reduce(q.grad)
        if not a.sum:
            q.grad /= world
    opt.step()
    step += 1
    if step % 4 == 2:
        states = [None] * world
        dist.all_gather_object(states, torch.get_rng_state())
        if rank == 0:
            os.makedirs(a.out, exist_ok=True)
            torch.save(
                dict(net=net.state_dict(), opt=opt.state_dict(), step=step, rng=states),
                f"{a.out}/{step}.pt",
            )
