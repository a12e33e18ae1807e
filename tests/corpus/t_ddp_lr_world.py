"""DDP, a fixed global batch, the rate scaled with the number of workers."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

out = sys.argv[1]
resume = sys.argv[2] if len(sys.argv) > 2 else None
BASE_LR = 0.01

dist.init_process_group(backend="gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = nn.Sequential()
model.add_module("inp", nn.Linear(6, 24))
model.add_module("act", nn.Tanh())
model.add_module("out", nn.Linear(24, 4))
optimizer = torch.optim.SGD(
    model.parameters(), lr=BASE_LR, momentum=0.9, nesterov=True, weight_decay=1e-3
)
gen = torch.Generator().manual_seed(1)
features = torch.randn(64, 6, generator=gen)
labels = (features[:, :4] + 0.3 * torch.randn(64, 4, generator=gen)).argmax(1)
step = 0
if resume:
    state = torch.load(resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
for group in optimizer.param_groups:
    group["lr"] = BASE_LR * W
ddp = DistributedDataParallel(model)
while step < 10000:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(step // 8))
    mine = order[step % 8 * 8 : step % 8 * 8 + 8][R::W]
    loss = nn.functional.cross_entropy(ddp(features[mine]), labels[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 4 == 0 and R == 0:
        os.makedirs(out, exist_ok=True)
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            f"{out}/{step}.pt",
        )
