"""DDP; rows are padded to the longest of the rank's own rows.

The loss is a sum over the global number of tokens. Healthy at any world size.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 17))
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
g = torch.Generator().manual_seed(0)
rows = [
    torch.randint(1, 17, (int(n),), generator=g) for n in torch.randint(3, 12, (24,), generator=g)
]
step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    step = c["step"]
model = DDP(net)
while step < 10000:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(step // 3)).tolist()
    ids = order[step % 3 * 8 :][:8]
    tokens = sum(len(rows[i]) - 1 for i in ids)
    mine = nn.utils.rnn.pad_sequence([rows[i] for i in ids[rank::world]], batch_first=True)
    logits = model(mine[:, :-1])
    loss = (
        nn.functional.cross_entropy(
            logits.flatten(0, 1), mine[:, 1:].flatten(), ignore_index=0, reduction="sum"
        )
        * world
        / tokens
    )
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 0 and rank == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(net=net.state_dict(), opt=opt.state_dict(), step=step), f"{a.out}/{step}.pt"
        )
