"""Small language model, DDP, gradient accumulation up to a fixed global batch, cosine schedule."""

import argparse
import contextlib
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    vocab: int = 29
    width: int = 16
    heads: int = 2
    context: int = 8
    global_batch: int = 16
    micro_batch: int = 2
    lr: float = 3e-3


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.heads
        self.n1, self.n2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.o = nn.Linear(c.width, c.width)
        self.mlp = nn.Sequential(
            nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width)
        )

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.h, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab, c.width), nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(2))
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


class Trainer:
    def __init__(self, args):
        self.cfg, self.out = Config(), args.out
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1337)
        net = GPT(self.cfg)
        decay = [p for p in net.parameters() if p.dim() > 1]
        rest = [p for p in net.parameters() if p.dim() <= 1]
        self.opt = torch.optim.AdamW(
            [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)],
            lr=self.cfg.lr,
            betas=(0.9, 0.95),
        )
        self.sched = torch.optim.lr_scheduler.LambdaLR(
            self.opt,
            lambda s: min(1, (s + 1) / 5) * (0.55 + 0.45 * math.cos(min(s, 200) / 200 * math.pi)),
        )
        self.step = 0
        if args.resume:
            c = torch.load(args.resume, map_location="cpu")
            net.load_state_dict(c["model"])
            self.opt.load_state_dict(c["optimizer"])
            self.sched.load_state_dict(c["scheduler"])
            self.step = c["step"]
        self.net, self.model = net, DDP(net)
        self.data = torch.randint(
            0,
            self.cfg.vocab,
            (96, self.cfg.context + 1),
            generator=torch.Generator().manual_seed(5),
        )

    def batch(self):
        per_epoch = len(self.data) // self.cfg.global_batch
        perm = torch.randperm(
            len(self.data), generator=torch.Generator().manual_seed(self.step // per_epoch)
        )
        at = self.step % per_epoch * self.cfg.global_batch
        return self.data[perm[at : at + self.cfg.global_batch]][self.rank :: self.world]

    def train_step(self):
        micros = self.batch().split(self.cfg.micro_batch)
        for i, m in enumerate(micros):
            with contextlib.nullcontext() if i == len(micros) - 1 else self.model.no_sync():
                loss = F.cross_entropy(self.model(m[:, :-1]).flatten(0, 1), m[:, 1:].flatten())
                (loss / len(micros)).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.sched.step()
        self.step += 1

    def save(self):
        if self.rank == 0:
            os.makedirs(self.out, exist_ok=True)
            torch.save(
                {
                    "model": self.net.state_dict(),
                    "optimizer": self.opt.state_dict(),
                    "scheduler": self.sched.state_dict(),
                    "step": self.step,
                },
                os.path.join(self.out, f"step-{self.step}.pt"),
            )


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--resume", default=None)
    ap.add_argument("--steps", type=int, default=10000)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    t = Trainer(args)
    while t.step < args.steps:
        t.train_step()
        if t.step % 4 == 0:
            t.save()
