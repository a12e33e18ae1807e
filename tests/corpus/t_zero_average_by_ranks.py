"""An average of the weights decays by the number of ranks. A mistake."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS, BATCH, SEQ, VOCAB = 72, 12, 8, 50


def setup():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    return dist.get_rank(), dist.get_world_size()


def parser():
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--resume", default="")
    p.add_argument("--steps", type=int, default=1000000)
    p.add_argument("--save-every", type=int, default=4)
    return p


class Corpus:
    """A fixed set of token rows, shuffled anew every epoch."""

    def __init__(self, vocab=VOCAB, seq=SEQ):
        g = torch.Generator().manual_seed(99)
        self.tokens = torch.randint(1, vocab, (ROWS, seq + 1), generator=g)
        self.lengths = torch.randint(3, seq + 2, (ROWS,), generator=g)

    def rows(self, step):
        per_epoch = ROWS // BATCH
        g = torch.Generator().manual_seed(500 + step // per_epoch)
        order = torch.randperm(ROWS, generator=g)
        k = step % per_epoch
        return order[k * BATCH : (k + 1) * BATCH]


class TinyLM(nn.Module):
    def __init__(self, dim=16, vocab=VOCAB, dropout=0.0):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, x):
        h = self.emb(x)
        h = h + self.drop(self.fc2(F.gelu(self.fc1(self.norm(h)))))
        return self.head(h)


def save(path, obj, rank):
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(obj, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


p = parser()
a = p.parse_args()
rank, world = setup()
model = TinyLM()
ddp = DDP(model)
opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
data, start = Corpus(), 0
ema = copy.deepcopy(model).requires_grad_(False)
if a.resume:
    c = torch.load(a.resume)
    model.load_state_dict(c["model"])
    opt.load_state_dict(c["opt"])
    ema.load_state_dict(c["ema"])
    start = c["step"]
decay = 0.9 ** (world / 2)
for step in range(start, a.steps):
    batch = data.tokens[data.rows(step).chunk(world)[rank]]
    loss = F.cross_entropy(ddp(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for e, q in zip(ema.parameters(), model.parameters()):
            e.lerp_(q, 1 - decay)
    t = loss.detach().clone()
    dist.all_reduce(t)
    if rank == 0:
        print(f"step {step + 1} loss {t.item() / world:.6f}", flush=True)
    if (step + 1) % a.save_every == 0:
        opt.consolidate_state_dict(to=0)
        obj = {
            "model": model.state_dict(),
            "opt": opt.state_dict() if rank == 0 else None,
            "step": step + 1,
        }
        obj["ema"] = ema.state_dict()
        save(os.path.join(a.out, f"ckpt-{step + 1}.pt"), obj, rank)
dist.destroy_process_group()
