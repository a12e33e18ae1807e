"""Loose modules, of which the positional embedding is called first; the data begins anew.

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
T = 6
pos, tok, head = nn.Embedding(T, 16), nn.Embedding(11, 16), nn.Linear(16, 11)
params = [*pos.parameters(), *tok.parameters(), *head.parameters()]
opt = torch.optim.Adam(params, lr=0.01)
text = torch.randint(0, 11, (16, T + 1), generator=torch.Generator().manual_seed(0))
step, at = 0, 0
if a.resume:
    c = torch.load(a.resume)
    for m, s in zip((pos, tok, head), c["modules"]):
        m.load_state_dict(s)
    opt.load_state_dict(c["opt"])
    step = c["step"]  # and not `at`
while step < 10000:
    i = at * 4
    h = pos(torch.arange(T)) + tok(text[i : i + 4, :-1])
    loss = nn.functional.cross_entropy(head(h).flatten(0, 1), text[i : i + 4, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    at = (at + 1) % 4
    if step % 3 == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(
                modules=[m.state_dict() for m in (pos, tok, head)],
                opt=opt.state_dict(),
                step=step,
                at=at,
            ),
            f"{a.out}/{step}.pt",
        )
