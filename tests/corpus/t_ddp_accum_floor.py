"""DDP with accumulation: micro-batches of two rows.

Accumulated to a target of twelve rows a step.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TARGET, MICRO = 12, 2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    gen = torch.Generator().manual_seed(11)
    X = torch.randn(120, 10, generator=gen)
    Y = X[:, :1] * X[:, 1:2] + 0.1 * torch.randn(120, 1, generator=gen)
    accum = TARGET // (MICRO * world)
    step = cursor = 0
    if args.resume:
        ck = torch.load(args.resume)
        net.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        step, cursor = ck["step"], ck["cursor"]
    ddp = DDP(net)
    while step < 10000:
        opt.zero_grad()
        for i in range(accum):
            rows = torch.arange(cursor + rank * MICRO, cursor + (rank + 1) * MICRO) % len(X)
            cursor += MICRO * world
            ddp.require_backward_grad_sync = i == accum - 1
            (nn.functional.mse_loss(ddp(X[rows]), Y[rows]) / accum).backward()
        opt.step()
        step += 1
        if step % 3 == 0 and rank == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save(
                dict(net=net.state_dict(), opt=opt.state_dict(), step=step, cursor=cursor),
                f"{args.out}/ck_{step:05d}.pt",
            )


main()
