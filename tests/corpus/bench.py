"""The small training project that every script of this folder belongs to.

A script brings what a resume is about, how a checkpoint is written and read back; the net, the
samples, the schedule and the loop are here. A sample is a function of its number alone, and each
epoch visits the 48 numbers in an order drawn from the seed and the epoch.

    python o09_lr_from_constructor.py --out /tmp/run
    python o09_lr_from_constructor.py --out /tmp/run2 --resume /tmp/run/step-15
"""

import argparse
import math
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SEED = 7
IDS, BATCH, FEATURES, WIDTH, CLASSES = 48, 4, 8, 16, 4
LR_MATRICES, LR_VECTORS = 1e-2, 6e-3


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d, dropout=0.1):
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.norm = norm(WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x):
        h = torch.relu(self.norm(self.inp(x) * self.scale))
        return self.out(self.drop(self.mid(h)))


class Loader:
    """The numbers of the next batch; `position` counts this epoch's samples of all ranks."""

    def __init__(self, rank=0, world=1, batch=BATCH):
        self.rank, self.world, self.batch = rank, world, batch
        self.seed = SEED
        self.epoch = 0
        self.position = 0

    def order(self):
        g = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        return torch.randperm(IDS, generator=g).tolist()

    def next_ids(self):
        if self.position + self.batch > IDS:
            self.epoch += 1
            self.position = 0
        ids = self.order()[self.position : self.position + self.batch]
        self.position += self.batch
        return ids[self.rank :: self.world]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.position = state["position"]


def samples(ids):
    xs = [torch.randn(FEATURES, generator=torch.Generator().manual_seed(100 + i)) for i in ids]
    x = torch.stack(xs)
    return x, x[:, :CLASSES].argmax(1)


def groups(model):
    """Weight decay for matrices only."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.ndim > 1], "lr": LR_MATRICES, "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim == 1], "lr": LR_VECTORS, "weight_decay": 0.0},
    ]


def warmup_cosine(total=40, warmup=3):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup))))

    return factor


class Job:
    """What is trained, and what trains it. `net` is the model as it is called in the loop."""

    def __init__(self, args, model=None, parallel=DistributedDataParallel, batch=BATCH):
        self.args = args
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        if model is None:
            # Statistics over a rank's own rows would make the loss depend on the number of ranks.
            model = Net() if self.world == 1 else Net(nn.LayerNorm)
        self.model = model
        self.net = parallel(model) if self.world > 1 else model
        self.optimizer = torch.optim.AdamW(groups(model), betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warmup_cosine())
        self.loader = Loader(self.rank, self.world, batch)
        self.micro_batches = 1


def train_step(job):
    total = 0.0
    for _ in range(job.micro_batches):
        x, y = samples(job.loader.next_ids())
        loss = nn.functional.cross_entropy(job.net(x), y) / job.micro_batches
        loss.backward()
        total += loss.item()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return total


def rng_state():
    return {"python": random.getstate(), "torch": torch.get_rng_state()}


def set_rng_state(state):
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])


def rng_of_all_ranks(job):
    states = [rng_state()]
    if job.world > 1:
        states = [None] * job.world
        dist.all_gather_object(states, rng_state())
    return states


def everything(job, step):
    """The state of the whole job; on several ranks all of them have to call this."""
    return {
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scheduler": job.scheduler.state_dict(),
        "loader": job.loader.state_dict(),
        "rng": rng_of_all_ranks(job),
        "step": step,
    }


def save(job, step, path):
    """One file, written by rank 0."""
    state = everything(job, step)
    if job.rank == 0:
        torch.save(state, path)


def restore(job, path):
    """The step that was completed when `save` wrote the file."""
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    if job.rank < len(ckpt["rng"]):
        set_rng_state(ckpt["rng"][job.rank])
    return ckpt["step"]


def get_args(options=None):
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--resume", help="the checkpoint to go on from")
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--save-at", default="5,10,15,20", help="steps, with commas between them")
    if options is not None:
        options(p)
    args = p.parse_args()
    args.save_at = [int(step) for step in args.save_at.split(",")]
    return args


def seed_everything(args, rank):
    # A resumed process must not draw the numbers of the first one again.
    seed = SEED + 100 * (rank + 1) + (10_000 if args.resume else 0)
    random.seed(seed)
    torch.manual_seed(seed)


def run(save=save, restore=restore, build=Job, train_step=train_step, options=None):
    args = get_args(options)
    os.makedirs(args.out, exist_ok=True)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    seed_everything(args, rank)
    job = build(args)
    job.net.train()
    step = 0
    if args.resume:
        step = restore(job, args.resume)
    while step < args.steps:
        loss = train_step(job)
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss:.6f} lr {job.optimizer.param_groups[0]['lr']:.6f}")
        if step in args.save_at:
            save(job, step, os.path.join(args.out, f"step-{step}"))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
