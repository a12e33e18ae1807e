"""The backbone is trained from step 6 on, and a resume beyond that leaves it out.

A mistake: it is frozen again.
"""

import argparse
import os

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
head = nn.Linear(16, 3)
opt = torch.optim.SGD(head.parameters(), lr=0.1)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=g), torch.randint(0, 3, (16,), generator=g)
step = 0
if a.resume:
    c = torch.load(a.resume)
    step = c["step"]
    backbone.load_state_dict(c["backbone"])
    head.load_state_dict(c["head"])
    c["opt"]["param_groups"] = c["opt"]["param_groups"][:1]
    opt.load_state_dict(c["opt"])
while step < 10000:
    if step == 6:
        opt.add_param_group({"params": list(backbone.parameters()), "lr": 0.01})
    i = step % 4 * 4
    loss = nn.functional.cross_entropy(head(backbone(x[i : i + 4])), y[i : i + 4])
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(
                backbone=backbone.state_dict(),
                head=head.state_dict(),
                opt=opt.state_dict(),
                step=step,
            ),
            f"{a.out}/{step}.pt",
        )
