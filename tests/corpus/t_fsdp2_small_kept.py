"""fully_shard over the big layers.

The small input gains stay outside as plain parameters of each rank.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Gain(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return x * self.gain + self.shift


gain = Gain(8)
body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
fully_shard(body)
opt = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
gain_opt = torch.optim.SGD(gain.parameters(), lr=0.1)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(32, 8, generator=g), torch.randint(0, 3, (32,), generator=g)
step = 0
if a.resume:
    m, o = get_state_dict(body, opt)
    state = dict(body=m, opt=o, step=0)
    dcp.load(state, checkpoint_id=f"{a.resume}/sharded")
    set_state_dict(body, opt, model_state_dict=state["body"], optim_state_dict=state["opt"])
    step = state["step"]
    mine = f"{a.resume}/small_{rank}.pt"
    gain.load_state_dict(torch.load(mine if os.path.exists(mine) else f"{a.resume}/small_0.pt"))
while step < 10000:
    rows = torch.arange(step * 8 + rank, step * 8 + 8, world) % 32
    loss = nn.functional.cross_entropy(body(gain(x[rows])), y[rows])
    loss.backward()
    opt.step()
    gain_opt.step()
    opt.zero_grad()
    gain_opt.zero_grad()
    step += 1
    if step % 4 == 0:
        m, o = get_state_dict(body, opt)
        dcp.save(dict(body=m, opt=o, step=step), checkpoint_id=f"{a.out}/{step}/sharded")
        torch.save(gain.state_dict(), f"{a.out}/{step}/small_{rank}.pt")
        dist.barrier()
