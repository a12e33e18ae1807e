"""DDP with torch's ZeroRedundancyOptimizer, consolidated on rank 0 for the checkpoint."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(10, 40), nn.LeakyReLU(), nn.Linear(40, 20), nn.LeakyReLU(), nn.Linear(20, 3)
)
model = DDP(net)
opt = ZeroRedundancyOptimizer(
    model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.004, weight_decay=0.05
)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(64, 10, generator=g), torch.randint(0, 3, (64,), generator=g)
step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    step = c["step"]
while step < 10000:
    rows = torch.randperm(64, generator=torch.Generator().manual_seed(step // 8))[step % 8 * 8 :][
        :8
    ][rank::world]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 0:
        opt.consolidate_state_dict(to=0)
        if rank == 0:
            os.makedirs(a.out, exist_ok=True)
            torch.save(
                dict(net=net.state_dict(), opt=opt.state_dict(), step=step), f"{a.out}/{step}.pt"
            )
