"""A model whose own attribute is called `module`: DDP at 2 ranks, bare at 1."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out")
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(torch.relu(self.module(x)))


net = Net()
opt = torch.optim.AdamW(net.parameters())
step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    step = c["step"]
model = nn.parallel.DistributedDataParallel(net) if world > 1 else net
while step < 20:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))[rank::world]
    opt.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    opt.step()
    step += 1
    if step % 4 == 0 and rank == 0:
        torch.save(
            {"net": net.state_dict(), "opt": opt.state_dict(), "step": step},
            os.path.join(a.out, f"{step}.pt"),
        )
