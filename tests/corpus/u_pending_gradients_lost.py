"""A save between micro-batches: the gradients that are pending are saved and not put back.

A mistake.
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
net = nn.Linear(8, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(12, 8, generator=g), torch.randint(0, 3, (12,), generator=g)
micro, step = 0, 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    micro, step = c["micro"], c["step"]
while step < 10000:
    i = micro % 6 * 2
    nn.functional.cross_entropy(net(x[i : i + 2]), y[i : i + 2]).backward()
    micro += 1
    if micro % 4 == 0:
        opt.step()
        opt.zero_grad()
        step += 1
    if micro % 6 == 0:
        os.makedirs(a.out, exist_ok=True)
        grads = [q.grad if q.grad is None else q.grad.clone() for q in net.parameters()]
        torch.save(
            dict(net=net.state_dict(), opt=opt.state_dict(), micro=micro, step=step, grads=grads),
            f"{a.out}/{step}.pt",
        )
