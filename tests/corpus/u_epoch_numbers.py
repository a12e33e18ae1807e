"""Checkpoints are numbered by epochs of five steps. Healthy."""

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
data = torch.utils.data.TensorDataset(torch.randn(20, 8), torch.randint(0, 3, (20,)))
first = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    first = c["epoch"]
for epoch in range(first, 100):
    order = torch.Generator().manual_seed(epoch)
    for x, y in torch.utils.data.DataLoader(data, 4, shuffle=True, generator=order):
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    os.makedirs(a.out, exist_ok=True)
    saved = dict(net=net.state_dict(), opt=opt.state_dict(), epoch=epoch + 1)
    torch.save(saved, f"{a.out}/epoch{epoch + 1}.pt")
