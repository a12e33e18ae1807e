"""Gradients are added up over the ranks and never divided.

The step is as many times as large as there are ranks. A mistake that shows at another world size.
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
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(32, 8, generator=g), torch.randint(0, 3, (32,), generator=g)
step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    step = c["step"]
while step < 10000:
    rows = slice(step % 4 * 8, step % 4 * 8 + 8)
    loss = nn.functional.cross_entropy(net(x[rows][rank::world]), y[rows][rank::world])
    opt.zero_grad()
    loss.backward()
    for q in net.parameters():
        dist.all_reduce(q.grad)
    opt.step()
    step += 1
    if step % 4 == 2 and rank == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(net=net.state_dict(), opt=opt.state_dict(), step=step), f"{a.out}/{step}.pt"
        )
