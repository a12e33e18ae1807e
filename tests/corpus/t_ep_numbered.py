"""Twelve experts over the ranks, each of which numbers its own from 0. Healthy."""

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
a = p.parse_args()
rank, world = setup()
DIM, E = 16, 12
per = E // world


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(world)[rank]


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(world)[rank].clone()

    @staticmethod
    def backward(ctx, g):
        out = [torch.empty_like(g) for _ in range(world)]
        dist.all_gather(out, g.contiguous())
        return torch.cat(out)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(per))

    def forward(self, x):
        every = AllGather.apply(x)
        gates = AllGather.apply(self.router(x).softmax(-1))
        out = sum(
            gates[:, rank * per + i, None] * torch.tanh(e(every))
            for i, e in enumerate(self.experts)
        )
        return x + ReduceScatter.apply(out)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.moe, self.head = nn.Embedding(VOCAB, DIM), MoE(), nn.Linear(DIM, VOCAB)

    def forward(self, x):
        return self.head(self.moe(self.emb(x).flatten(0, 1)))


def is_expert(n):
    return ".experts." in n


def owned(full):
    """The names that this rank holds, from the global ones."""
    out = {}
    for n, t in full.items():
        if is_expert(n):
            pre, rest = n.split(".experts.")
            i, leaf = rest.split(".", 1)
            i = int(i)
            if i // per == rank:
                out[f"{pre}.experts.{i % per}.{leaf}"] = t
        else:
            out[n] = t
    return out


def whole(local):
    parts = [None] * world
    dist.all_gather_object(parts, {n: t for n, t in local.items() if is_expert(n)})
    full = {n: t for n, t in local.items() if not is_expert(n)}
    for r, part in enumerate(parts):
        for n, t in part.items():
            pre, rest = n.split(".experts.")
            i, leaf = rest.split(".", 1)
            full[f"{pre}.experts.{int(i) + r * per}.{leaf}"] = t
    return full


model = Model()
g = torch.Generator().manual_seed(1)
ref = {
    f"moe.experts.{i}.{k}": torch.randn(*s, generator=g) * 0.3
    for i in range(E)
    for k, s in (("weight", (DIM, DIM)), ("bias", (DIM,)))
}
torch.manual_seed(2)
ref |= {
    "moe.router.weight": torch.randn(E, DIM) * 0.3,
    "emb.weight": torch.randn(VOCAB, DIM),
    "head.weight": torch.randn(VOCAB, DIM) * 0.2,
    "head.bias": torch.zeros(VOCAB),
}
model.load_state_dict(owned(ref))
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
names = [n for n, _ in model.named_parameters()]
data, start = Corpus(), 0
if a.resume:
    c = torch.load(a.resume)
    model.load_state_dict(owned(c["model"]))
    mom = {k: owned(c[k]) for k in ("exp_avg", "exp_avg_sq")}
    sd = opt.state_dict()
    sd["state"] = {
        i: {"step": torch.tensor(float(c["step"])), **{k: mom[k][n] for k in mom}}
        for i, n in enumerate(names)
    }
    opt.load_state_dict(sd)
    start = c["step"]
for step in range(start, a.steps):
    batch = data.tokens[data.rows(step).chunk(world)[rank]]
    loss = F.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    for n, q in model.named_parameters():
        if not is_expert(n):
            dist.all_reduce(q.grad)
        q.grad /= world
    opt.step()
    t = loss.detach().clone()
    dist.all_reduce(t)
    if rank == 0:
        print(f"step {step + 1} loss {t.item() / world:.6f}", flush=True)
    if (step + 1) % a.save_every == 0:
        obj = {"step": step + 1, "model": whole(dict(model.state_dict()))}
        for k in ("exp_avg", "exp_avg_sq"):
            obj[k] = whole({n: opt.state[q][k] for n, q in model.named_parameters()})
        save(os.path.join(a.out, f"ckpt-{step + 1}.pt"), obj, rank)
dist.destroy_process_group()
