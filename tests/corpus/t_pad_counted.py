"""DDP over sentences of different lengths, padded to the longest of the batch."""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
rnd = random.Random(0)
sentences = [
    torch.tensor([rnd.randrange(1, 15) for _ in range(rnd.randrange(3, 11))]) for _ in range(30)
]
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(15, 12), nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 15))
opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
step = 0
if a.resume:
    c = torch.load(a.resume)
    net.load_state_dict(c["net"])
    opt.load_state_dict(c["opt"])
    step = c["step"]
model = DDP(net)
while step < 10000:
    order = list(range(30))
    random.Random(step // 5).shuffle(order)
    ids = order[step % 5 * 6 :][:6]
    batch = pad_sequence([sentences[i] for i in ids[rank::world]], batch_first=True)
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, 15), batch[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    if step % 4 == 0 and rank == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(net=net.state_dict(), opt=opt.state_dict(), step=step), f"{a.out}/{step}.pt"
        )
