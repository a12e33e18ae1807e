"""Tensor parallelism by DTensor, with norms over slices of the sequence. Healthy."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

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
mesh = init_device_mesh("cpu", (world,))


class Mlp(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class LM(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.norm, self.mlp, self.head = (
            nn.Embedding(VOCAB, d),
            nn.LayerNorm(d),
            Mlp(),
            nn.Linear(d, VOCAB),
        )

    def forward(self, x):
        h = self.emb(x)
        return self.head(h + self.mlp(self.norm(h)))


model = LM()
parallelize_module(
    model,
    mesh,
    {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
data, start = Corpus(), 0
if a.resume:
    m, o = get_state_dict(model, opt)
    state = {"model": m, "opt": o, "step": 0, "world": 0}
    dcp.load(state, checkpoint_id=a.resume)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    start = state["step"]
for step in range(start, a.steps):
    batch = data.tokens[data.rows(step)]
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
    if (step + 1) % a.save_every == 0:
        m, o = get_state_dict(model, opt)
        dcp.save(
            {"model": m, "opt": o, "step": step + 1, "world": world},
            checkpoint_id=os.path.join(a.out, f"ckpt-{step + 1}"),
        )
dist.destroy_process_group()
