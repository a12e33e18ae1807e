"""Momentum is kept in 8 bits by a tensor subclass, saved, and not put back.

A mistake.
"""

import argparse
import os

import torch
from torch import nn


class Bits8(torch.Tensor):
    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{cls.__name__} dispatch: {func}")


def quantize(t):
    scale = t.abs().max() / 127 + 1e-12
    return Bits8((t / scale).round().to(torch.int8), scale)


class SGD8(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.05))

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            old = self.state[p].get("momentum")
            m = p.grad + (0.9 * old.codes * old.scale if old is not None else 0)
            self.state[p]["momentum"] = quantize(m)
            p.sub_(self.param_groups[0]["lr"] * m)


p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
torch.manual_seed(0)
net = nn.Linear(8, 3)
opt = SGD8(net.parameters())
g = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=g), torch.randint(0, 3, (16,), generator=g)
step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    step = c["step"]
while step < 10000:
    i = step % 4 * 4
    loss = nn.functional.cross_entropy(net(x[i : i + 4]), y[i : i + 4])
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 0:
        os.makedirs(a.out, exist_ok=True)
        m = [
            (opt.state[q]["momentum"].codes, opt.state[q]["momentum"].scale)
            for q in net.parameters()
        ]
        torch.save(dict(net=net.state_dict(), momentum=m, step=step), f"{a.out}/{step}.pt")
