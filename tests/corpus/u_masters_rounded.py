"""Float32 masters are made of the bfloat16 weights after a resume.

A mistake: what rounding had left of them is lost.
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
net = nn.Linear(8, 3).bfloat16()
masters = [q.detach().float().requires_grad_() for q in net.parameters()]
opt = torch.optim.Adam(masters, lr=0.01)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=g).bfloat16(), torch.randint(0, 3, (16,), generator=g)
step = 0
if a.resume:
    c = torch.load(a.resume)
    step = c["step"]
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    for m, q in zip(masters, net.parameters()):
        m.data.copy_(q.data)
while step < 10000:
    i = step % 4 * 4
    nn.functional.cross_entropy(net(x[i : i + 4]).float(), y[i : i + 4]).backward()
    for m, q in zip(masters, net.parameters()):
        m.grad, q.grad = q.grad.float(), None
    opt.step()
    for m, q in zip(masters, net.parameters()):
        q.data.copy_(m.data)
    step += 1
    if step % 4 == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(
                net=net.state_dict(),
                opt=opt.state_dict(),
                masters=[m.detach() for m in masters],
                step=step,
            ),
            f"{a.out}/{step}.pt",
        )
