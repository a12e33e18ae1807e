"""Data parallel by hand: average over ranks, clip, step."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
p.add_argument("--max-norm", type=float, default=0.5)
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
encoder, decoder = nn.LSTM(4, 12, batch_first=True), nn.Linear(12, 4)
params = [*encoder.parameters(), *decoder.parameters()]
opt = torch.optim.SGD(params, lr=0.3, momentum=0.9)
series = torch.randn(64, 7, 4, generator=torch.Generator().manual_seed(1)).cumsum(1) / 2
step = 0
if a.resume:
    c = torch.load(a.resume)
    encoder.load_state_dict(c["encoder"])
    decoder.load_state_dict(c["decoder"])
    opt.load_state_dict(c["opt"])
    step = c["step"]
while step < 10000:
    rows = series[step % 8 * 8 :][:8].chunk(world)[rank]
    loss = ((decoder(encoder(rows[:, :-1])[0]) - rows[:, 1:]) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    for q in params:
        dist.all_reduce(q.grad)
        q.grad /= world
    nn.utils.clip_grad_norm_(params, a.max_norm)
    opt.step()
    step += 1
    if step % 4 == 0 and rank == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(
            dict(
                encoder=encoder.state_dict(),
                decoder=decoder.state_dict(),
                opt=opt.state_dict(),
                step=step,
            ),
            f"{a.out}/{step}.pt",
        )
