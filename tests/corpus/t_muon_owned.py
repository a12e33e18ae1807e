"""Muon for the matrices.

Each owned by one rank that orthogonalises its momentum and sends the result; AdamW for the rest.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


def orthogonal(g, steps=5):
    x = g / (g.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def owned(self):
        return [
            (i, q)
            for i, q in enumerate(self.param_groups[0]["params"])
            if i % self.world == self.rank
        ]

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        updates = [torch.empty_like(q) for q in group["params"]]
        for i, q in self.owned():
            buf = self.state[q].setdefault("momentum_buffer", torch.zeros_like(q))
            buf.mul_(group["momentum"]).add_(q.grad)
            updates[i] = orthogonal(q.grad.add(buf, alpha=group["momentum"]))
        for i, q in enumerate(group["params"]):
            dist.broadcast(updates[i], i % self.world)
            q.sub_(updates[i], alpha=group["lr"])


p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
D = 12
torch.manual_seed(0)
body = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(5))
emb, head = nn.Embedding(20, D), nn.Linear(D, 20)
net = nn.ModuleDict(dict(emb=emb, body=body, head=head))
muon = Muon(body.parameters())
adam = torch.optim.AdamW([*emb.parameters(), *head.parameters()], lr=0.004)
step = 0
if a.resume:
    c = torch.load(f"{a.resume}/model.pt")
    net.load_state_dict(c["net"])
    adam.load_state_dict(c["adam"])
    step = c["step"]
    momenta = {}
    for f in os.listdir(a.resume):
        if f.startswith("muon"):
            momenta |= torch.load(f"{a.resume}/{f}")
    for i, q in muon.owned():
        muon.state[q]["momentum_buffer"] = momenta[f"body.{i}.weight"]
data = torch.randint(0, 20, (48, 7), generator=torch.Generator().manual_seed(0))
while step < 10000:
    rows = data[step % 6 * 8 :][:8][rank::world]
    x = emb(rows[:, :-1])
    for layer in body:
        x = x + torch.tanh(layer(x.cumsum(1) / 3))
    loss = nn.functional.cross_entropy(head(x).flatten(0, 1), rows[:, 1:].flatten())
    net.zero_grad()
    loss.backward()
    for q in net.parameters():
        dist.all_reduce(q.grad)
        q.grad.div_(world)
    muon.step()
    adam.step()
    step += 1
    if step % 4 == 0:
        folder = f"{a.out}/{step}"
        os.makedirs(folder, exist_ok=True)
        torch.save(
            {f"body.{i}.weight": muon.state[q]["momentum_buffer"] for i, q in muon.owned()},
            f"{folder}/muon{rank}.pt",
        )
        if rank == 0:
            torch.save(
                dict(net=net.state_dict(), adam=adam.state_dict(), step=step), f"{folder}/model.pt"
            )
        dist.barrier()
