"""Training ends after three evaluations that brought nothing; the count is saved. Healthy."""

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
opt = torch.optim.SGD(net.parameters(), lr=0.1)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=g), torch.randint(0, 3, (16,), generator=g)
step, waited = 0, 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    step, waited = c["step"], c["waited"]
while waited < 3:
    for i in range(0, 16, 4):
        loss = nn.functional.cross_entropy(net(x[i : i + 4]), y[i : i + 4])
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
    waited += 1  # stands for an evaluation that did not get better
    os.makedirs(a.out, exist_ok=True)
    torch.save(
        dict(net=net.state_dict(), opt=opt.state_dict(), step=step, waited=waited),
        f"{a.out}/{step}.pt",
    )
print("ended at", step)
