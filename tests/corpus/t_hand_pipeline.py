"""A pipeline by hand, one stage per rank.

Activations go forward and gradients come back by send and recv. Every rank reads the batch; the
first uses the tokens, the last the labels. Healthy.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
parts = {
    "emb": nn.Embedding(17, 8),
    "a": nn.Linear(8, 8),
    "b": nn.Linear(8, 8),
    "head": nn.Linear(8, 17),
}
names = list(parts)
mine = names[rank * 4 // world : (rank + 1) * 4 // world]
net = nn.Sequential()
for n in mine:
    net.add_module(n, parts[n])
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
rows = torch.randint(0, 17, (24, 7), generator=torch.Generator().manual_seed(0))
step = 0
if a.resume:
    saved = [torch.load(f) for f in sorted(os.path.join(a.resume, f) for f in os.listdir(a.resume))]
    step = saved[0]["step"]
    net.load_state_dict(
        {k: v for s in saved for k, v in s["net"].items() if k.split(".")[0] in mine}
    )
    moments = {k: v for s in saved for k, v in s["opt"].items()}
    opt.load_state_dict(
        dict(
            state={i: moments[n] for i, (n, _) in enumerate(net.named_parameters())},
            param_groups=opt.state_dict()["param_groups"],
        )
    )
while step < 10000:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(step // 3))
    batch = rows[order[step % 3 * 8 :][:8]]
    x = batch[:, :-1]
    if rank:
        x = torch.empty(8, 6, 8)
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
        nn.functional.cross_entropy(y.flatten(0, 1), batch[:, 1:].flatten()).backward()
    if rank:
        dist.send(x.grad, rank - 1)
    opt.step()
    step += 1
    if step % 4 == 0:
        os.makedirs(f"{a.out}/{step}", exist_ok=True)
        state = {n: opt.state_dict()["state"][i] for i, (n, _) in enumerate(net.named_parameters())}
        torch.save(
            dict(net=net.state_dict(), opt=state, step=step), f"{a.out}/{step}/stage{rank}.pt"
        )
    dist.barrier()
