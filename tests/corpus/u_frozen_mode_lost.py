"""The frozen backbone is put into eval mode before training; a resumed run forgets that.

A mistake: its dropout draws.
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
net = nn.ModuleDict(
    dict(backbone=nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2)), head=nn.Linear(16, 3))
)
net["backbone"].requires_grad_(False)
opt = torch.optim.Adam(net["head"].parameters(), lr=0.01)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=g), torch.randint(0, 3, (16,), generator=g)
step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    torch.set_rng_state(c["rng"])
    step = c["step"]
else:
    net["backbone"].eval()
while step < 10000:
    i = step % 4 * 4
    loss = nn.functional.cross_entropy(net["head"](net["backbone"](x[i : i + 4])), y[i : i + 4])
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 2:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(net=net.state_dict(), opt=opt.state_dict(), step=step, rng=torch.get_rng_state()),
            f"{a.out}/{step}.pt",
        )
