"""Only the newest checkpoint is kept; the resumed run begins its data anew. A mistake."""

import argparse
import glob
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
step, at = 0, 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    step, at = c["step"], 1
while step < 10000:
    i = at % 4 * 4
    at += 1
    loss = nn.functional.cross_entropy(net(x[i : i + 4]), y[i : i + 4])
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(net=net.state_dict(), opt=opt.state_dict(), step=step), f"{a.out}/{step}.pt"
        )
        for old in glob.glob(f"{a.out}/*.pt"):
            if os.path.basename(old) != f"{step}.pt":
                os.unlink(old)
