"""Context parallel by hand: each rank holds a contiguous slice of every sequence.

Keys and values are gathered.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class AllGatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, start):
        q, k, v = self.q(x), AllGatherSequence.apply(self.k(x)), AllGatherSequence.apply(self.v(x))
        at = torch.arange(start, start + x.size(1))
        mask = at[:, None] >= torch.arange(k.size(1))[None]
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Model(nn.Module):
    def __init__(self, vocab=16, d=12, length=12):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.atts = nn.ModuleList(Attention(d) for _ in range(2))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, start):
        x = self.tok(ids) + self.pos(torch.arange(start, start + ids.size(1)))
        for n, att in zip(self.norms, self.atts):
            x = x + att(n(x), start)
        return self.head(x)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--resume")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Model()
    opt = torch.optim.AdamW(net.parameters(), lr=0.004)
    data = torch.randint(0, 16, (40, 13), generator=torch.Generator().manual_seed(3))
    step = 0
    if a.resume:
        c = torch.load(a.resume)
        net.load_state_dict(c["net"])
        opt.load_state_dict(c["opt"])
        step = c["step"]
    size = 12 // world
    while step < 10000:
        rows = data[step % 5 * 8 :][:8]
        start = rank * size
        ids, labels = rows[:, start : start + size], rows[:, start + 1 : start + size + 1]
        loss = F.cross_entropy(net(ids, start).flatten(0, 1), labels.flatten())
        opt.zero_grad()
        loss.backward()
        for q in net.parameters():
            dist.all_reduce(q.grad)
            q.grad /= world
        opt.step()
        step += 1
        if step % 4 == 0 and rank == 0:
            os.makedirs(a.out, exist_ok=True)
            torch.save(
                dict(net=net.state_dict(), opt=opt.state_dict(), step=step), f"{a.out}/{step}.pt"
            )


main()
