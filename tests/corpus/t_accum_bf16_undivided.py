"""DDP in bf16 autocast; as many micro-batches of two rows as the global batch of eight needs."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--resume")
    return p.parse_args()


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 5)
    )


def micro_batches(step, rank, world, size=2, batch=8, n=40):
    rows = [(step * batch + i) % n for i in range(batch)]
    mine = rows[rank * batch // world : (rank + 1) * batch // world]
    return [mine[i : i + size] for i in range(0, len(mine), size)]


def main():
    a = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = build()
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 12, generator=g), torch.randint(0, 5, (40,), generator=g)
    step = 0
    if a.resume:
        c = torch.load(a.resume)
        net.load_state_dict(c["net"])
        opt.load_state_dict(c["opt"])
        step = c["step"]
    model = DDP(net)
    while step < 10000:
        opt.zero_grad()
        parts = micro_batches(step, rank, world)
        for k, rows in enumerate(parts):
            model.require_backward_grad_sync = k + 1 == len(parts)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x[rows])
            nn.functional.cross_entropy(logits.float(), y[rows]).backward()
        opt.step()
        step += 1
        if step % 4 == 0 and rank == 0:
            os.makedirs(a.out, exist_ok=True)
            torch.save(
                dict(net=net.state_dict(), opt=opt.state_dict(), step=step), f"{a.out}/{step}.pt"
            )


main()
