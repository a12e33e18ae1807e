"""A pipeline by hand: a list of all layers stays on every rank, each trains its own. Healthy."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

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


def save(path, obj, rank):
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(obj, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


p = parser()
p.add_argument("--micros", type=int, default=4)
a = p.parse_args()
rank, world = setup()
micros = a.micros
DIM, LAYERS = 16, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


torch.manual_seed(5)
layers = nn.ModuleList(
    [nn.Embedding(VOCAB, DIM)] + [Layer() for _ in range(LAYERS)] + [nn.Linear(DIM, VOCAB)]
)
bounds = [len(layers) * r // world for r in range(world + 1)]
mine = list(range(bounds[rank], bounds[rank + 1]))
stage = nn.ModuleDict({str(i): layers[i] for i in mine})
opt = torch.optim.Adam(stage.parameters(), lr=5e-3)
pnames = [n for n, _ in stage.named_parameters()]
data, start = Corpus(), 0
if a.resume:
    c = torch.load(a.resume)
    stage.load_state_dict({n: c["model"][n] for n in stage.state_dict()})
    sd = opt.state_dict()
    sd["state"] = {i: c["opt"][n] for i, n in enumerate(pnames)}
    opt.load_state_dict(sd)
    start = c["step"]
for step in range(start, a.steps):
    batch = data.tokens[data.rows(step)]
    losses, kept = [], []
    for mb in batch.chunk(micros):
        if rank == 0:
            x = inp = mb[:, :-1]
        else:
            inp = torch.empty(len(mb), SEQ, DIM)
            dist.recv(inp, rank - 1)
            x = inp.requires_grad_()
        for i in mine:
            x = stage[str(i)](x)
        if rank < world - 1:
            dist.send(x.detach(), rank + 1)
        else:
            x = F.cross_entropy(x.flatten(0, 1), mb[:, 1:].flatten())
            losses.append(x.item())
            x = x / micros
        kept.append((inp, x))
    opt.zero_grad()
    for inp, x in kept:
        if rank == world - 1:
            x.backward()
        else:
            grad = torch.empty_like(x)
            dist.recv(grad, rank + 1)
            x.backward(grad)
        if rank > 0:
            dist.send(inp.grad, rank - 1)
    opt.step()
    if rank == world - 1:
        print(f"step {step + 1} loss {sum(losses) / micros:.6f}", flush=True)
    if (step + 1) % a.save_every == 0:
        parts = [None] * world
        local = {n: opt.state[q] for n, q in stage.named_parameters()}
        dist.all_gather_object(parts, (stage.state_dict(), local))
        save(
            os.path.join(a.out, f"ckpt-{step + 1}.pt"),
            {
                "step": step + 1,
                "model": {k: v for m, _ in parts for k, v in m.items()},
                "opt": {k: v for _, o in parts for k, v in o.items()},
            },
            rank,
        )
dist.destroy_process_group()
