"""A mixture of experts; each rank holds some of them, under their global numbers.

A file of experts per rank and one of the rest.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
p.add_argument("--ep", type=int, default=0, help="ranks that share the experts; default: all")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
EP = a.ep or world
EXPERTS, D = 4, 8
LOCAL = EXPERTS // EP
for i in range(0, world, EP):
    g = dist.new_group(list(range(i, i + EP)))
    if i <= rank < i + EP:
        ep_group = g
for i in range(EP):
    g = dist.new_group(list(range(i, world, EP)))
    if rank % EP == i:
        same_experts = g
me = rank % EP


class Collect(torch.autograd.Function):
    """Tokens of all ranks that share the experts."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(EP)]
        dist.all_gather(parts, x.contiguous(), group=ep_group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ep_group)
        return grad.chunk(EP)[me].clone()


class Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=ep_group)
        return x.chunk(EP)[me].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(EP)]
        dist.all_gather(parts, grad.contiguous(), group=ep_group)
        return torch.cat(parts)


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        every = [
            nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, D)) for _ in range(EXPERTS)
        ]
        self.experts = nn.ModuleDict(
            {str(i): every[i] for i in range(me * LOCAL, (me + 1) * LOCAL)}
        )

    def forward(self, x):
        gate = torch.softmax(self.router(x), -1)
        w, pick = gate.topk(2, -1)
        all_x, all_w, all_pick = (
            Collect.apply(x),
            Collect.apply(w),
            Collect.apply(pick.float()).long(),
        )
        y = torch.zeros_like(all_x)
        for i, expert in self.experts.items():
            weight = (all_w * (all_pick == int(i))).sum(-1, keepdim=True)
            y = y + weight * expert(all_x)
        return x + Return.apply(y)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, D), Moe(), nn.Linear(D, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(48, 5, generator=g), torch.randint(0, 3, (48,), generator=g)
step = 0
if a.resume:
    c = {"net": {}, "mom": {}}
    for f in os.listdir(a.resume):
        part = torch.load(f"{a.resume}/{f}")
        step = part["step"]
        for k in c:
            c[k].update(part[k])
    with torch.no_grad():
        for n, q in net.named_parameters():
            q.copy_(c["net"][n])
            opt.state[q]["momentum_buffer"] = c["mom"][n]
while step < 10000:
    rows = torch.arange(step * 16, step * 16 + 16)[rank::world] % 48
    loss = F.cross_entropy(net(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    for n, q in net.named_parameters():
        if "experts" in n:
            dist.all_reduce(q.grad, group=same_experts)
            q.grad /= dist.get_world_size(same_experts)
        else:
            dist.all_reduce(q.grad)
            q.grad /= world
    opt.step()
    step += 1
    if step % 4 == 0:
        folder = f"{a.out}/{step}"
        os.makedirs(folder, exist_ok=True)
        mine = {n: q for n, q in net.named_parameters()}
        for what, names in (
            ("dense", [n for n in mine if "experts" not in n]),
            (f"experts-{me}", [n for n in mine if "experts" in n]),
        ):
            if rank == 0 or (what != "dense" and rank < EP):
                torch.save(
                    {
                        "net": {n: mine[n].detach() for n in names},
                        "mom": {n: opt.state[mine[n]]["momentum_buffer"] for n in names},
                        "step": step,
                    },
                    f"{folder}/{what}.pt",
                )
        dist.barrier()
