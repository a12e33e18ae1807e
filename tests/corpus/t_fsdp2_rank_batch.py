"""fully_shard with a fixed batch per rank."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

PER_RANK = 4


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--resume")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 1))
    fully_shard(net[2])
    fully_shard(net)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, 6, generator=g)
    y = (x.prod(1, keepdim=True)).tanh()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    step = 0
    if a.resume:
        state = {
            "net": get_model_state_dict(net),
            "opt": get_optimizer_state_dict(net, opt, options=options),
            "step": torch.tensor(0),
        }
        dcp.load(state, checkpoint_id=a.resume)
        set_model_state_dict(net, state["net"])
        set_optimizer_state_dict(net, opt, state["opt"], options=options)
        step = int(state["step"])
    while step < 10000:
        first = (step * world + rank) * PER_RANK
        rows = torch.arange(first, first + PER_RANK) % 96
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 4 == 0:
            dcp.save(
                {
                    "net": get_model_state_dict(net),
                    "opt": get_optimizer_state_dict(net, opt, options=options),
                    "step": torch.tensor(step),
                },
                checkpoint_id=os.path.join(a.out, str(step)),
            )


if __name__ == "__main__":
    main()
