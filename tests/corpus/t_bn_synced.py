"""DDP with batch normalisation over the rows of all ranks.

Written out (torch's SyncBatchNorm wants a GPU).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP


class GlobalBatchNorm(nn.Module):
    def __init__(self, n, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))
        self.register_buffer("running_mean", torch.zeros(n))
        self.register_buffer("running_var", torch.ones(n))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        if not self.training:
            return (x - self.running_mean) / (
                self.running_var + self.eps
            ).sqrt() * self.weight + self.bias
        count = len(x) * dist.get_world_size()
        mean = all_reduce(x.sum(0)) / count
        var = all_reduce(((x - mean) ** 2).sum(0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


ap = argparse.ArgumentParser()
ap.add_argument("--out", required=True)
ap.add_argument("--resume")
opts = ap.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(8, 20, bias=False),
    GlobalBatchNorm(20),
    nn.ReLU(),
    nn.Linear(20, 20, bias=False),
    GlobalBatchNorm(20),
    nn.ReLU(),
    nn.Linear(20, 3),
)
optim = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(48, 8, generator=g), torch.randint(0, 3, (48,), generator=g)
it = 0
if opts.resume:
    ck = torch.load(opts.resume)
    net.load_state_dict(ck["net"])
    optim.load_state_dict(ck["optim"])
    it = ck["it"]
ddp = DDP(net)
while it < 10000:
    rows = torch.arange(it * 16 + rank, it * 16 + 16, world) % 48
    loss = nn.functional.cross_entropy(ddp(x[rows]), y[rows])
    optim.zero_grad()
    loss.backward()
    optim.step()
    it += 1
    if it % 4 == 0 and rank == 0:
        os.makedirs(opts.out, exist_ok=True)
        torch.save(
            dict(net=net.state_dict(), optim=optim.state_dict(), it=it), f"{opts.out}/{it}.pt"
        )
