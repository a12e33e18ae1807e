"""Pipeline by hand with one matrix for embedding and output.

The first and the last stage each hold a copy.
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
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
V, D, DEPTH = 13, 10, 4


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        word, layers = nn.Embedding(V, D), [nn.Linear(D, D) for _ in range(DEPTH)]
        nn.init.normal_(word.weight, std=0.5)
        if rank in (0, world - 1):
            self.word = word
        for i in range(rank * DEPTH // world, (rank + 1) * DEPTH // world):
            self.add_module(f"layer{i}", layers[i])

    def forward(self, x):
        if rank == 0:
            x = self.word(x)
        for n, m in self.named_children():
            if n != "word":
                x = x + torch.relu(m(x))
        return F.linear(x, self.word.weight) if rank == world - 1 else x


net = Stage()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
ends = dist.new_group([0, world - 1]) if world > 1 else None
rows = torch.randint(0, V, (32, 6), generator=torch.Generator().manual_seed(1))
step = 0
if a.resume:
    parts = sorted(os.listdir(a.resume), key=lambda f: int(f[5:-3]))
    saved = [torch.load(f"{a.resume}/{f}") for f in parts]
    step = saved[0]["step"]
    for n, q in net.named_parameters():
        s = next(s for s in saved if n in s["net"])
        q.data.copy_(s["net"][n])
        opt.state[q]["momentum_buffer"] = s["mom"][n].clone()
while step < 10000:
    batch = rows[step % 4 * 8 :][:8]
    x = batch[:, :-1]
    if rank:
        x = torch.empty(8, 5, D)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = net(x)
    opt.zero_grad()
    if rank < world - 1:
        dist.send(y.detach(), rank + 1)
        grad = torch.empty_like(y)
        dist.recv(grad, rank + 1)
        y.backward(grad)
    else:
        F.cross_entropy(y.flatten(0, 1), batch[:, 1:].flatten()).backward()
    if rank:
        dist.send(x.grad, rank - 1)
    if world > 1 and rank in (0, world - 1):
        dist.all_reduce(net.word.weight.grad, group=ends)
    opt.step()
    step += 1
    if step % 4 == 0:
        os.makedirs(f"{a.out}/{step}", exist_ok=True)
        torch.save(
            dict(
                net=dict(net.named_parameters()),
                mom={n: opt.state[q]["momentum_buffer"] for n, q in net.named_parameters()},
                step=step,
            ),
            f"{a.out}/{step}/stage{rank}.pt",
        )
        dist.barrier()
