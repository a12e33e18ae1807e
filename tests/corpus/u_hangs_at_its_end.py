"""A rank never leaves at the end. Healthy: all steps are trained before."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Linear(8, 3)
opt = torch.optim.Adam(net.parameters(), lr=0.01)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=g), torch.randint(0, 3, (16,), generator=g)
step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    step = c["step"]
while step < 12:
    i = (step % 2 * 2 + rank) * 4 % 16
    loss = nn.functional.cross_entropy(net(x[i : i + 4]), y[i : i + 4])
    opt.zero_grad()
    loss.backward()
    for q in net.parameters():
        dist.all_reduce(q.grad)
        q.grad /= 2
    opt.step()
    step += 1
    if step % 4 == 2 and rank == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(net=net.state_dict(), opt=opt.state_dict(), step=step), f"{a.out}/{step}.pt"
        )
dist.barrier()
if rank == 0 and a.resume:
    time.sleep(100000)  # stands for the hang in destroy_process_group
