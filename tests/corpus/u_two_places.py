"""Weights and optimizer state are written to folders of their own. Healthy."""

import argparse
import os

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
torch.manual_seed(0)
net = nn.Linear(8, 3)
opt = torch.optim.Adam(net.parameters(), lr=0.01)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=g), torch.randint(0, 3, (16,), generator=g)
step = 0
if a.resume:
    net.load_state_dict(torch.load(a.resume))
    c = torch.load(a.resume.replace("weights", "optim"))
    opt.load_state_dict(c["opt"])
    step = c["step"]
while step < 10000:
    i = step % 4 * 4
    loss = nn.functional.cross_entropy(net(x[i : i + 4]), y[i : i + 4])
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 2:
        os.makedirs(f"{a.out}/weights", exist_ok=True)
        os.makedirs(f"{a.out}/optim", exist_ok=True)
        torch.save(net.state_dict(), f"{a.out}/weights/{step}.pt")
        torch.save(dict(opt=opt.state_dict(), step=step), f"{a.out}/optim/{step}.pt")
