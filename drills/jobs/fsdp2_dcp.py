"""Reference training job: FSDP2 with torch.distributed.checkpoint, every state item in use.

An ordinary script of a small language model: torch, the standard library, and NumPy where it is
installed. It is here because a drill needs a job whose resume is right in every item: two parameter
groups, a frozen layer, a tied weight, buffers of both kinds, dropout, a schedule, gradient
accumulation, an average of the weights, a data cursor, a loss scaler, random state of each rank.

In order: start the process group if there is more than one rank; build the model from the seed and
shard it; build optimizer, schedule and the rest; restore a checkpoint if asked; then train, saving
at the wanted steps. Run it with

    torchrun --nproc-per-node 2 fsdp2_dcp.py --out runs/a --save-at 4,8 --max-steps 12
    torchrun --nproc-per-node 4 fsdp2_dcp.py --out runs/b --resume runs/a/step-4 --max-steps 12
    torchrun --nproc-per-node 2 fsdp2_dcp.py --out runs/a --find latest --save-at 16 --max-steps 20

The same seed gives the same training on any number of ranks that divides the global batch, up to
the order in which floats are added.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException  # derives from BaseException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # torch < 2.6
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard

try:
    import numpy as np
except ImportError:
    np = None

VOCABULARY, HIDDEN, INNER, TOKENS = 257, 37, 85, 17  # odd: shards are uneven on 2, 3 and 4 ranks
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", "8"))  # samples of one micro-batch, all ranks
EPOCH_SAMPLES = 48
EMA_DECAY = 0.9

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
ROWS_PER_RANK = GLOBAL_BATCH // WORLD_SIZE  # on 3 ranks this leaves 2 of 8 rows unused
ROWS = slice(RANK * ROWS_PER_RANK, (RANK + 1) * ROWS_PER_RANK)
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")


class Dropout(nn.Module):
    """Dropout whose masks do not depend on the number of ranks.

    Each rank draws the mask of the whole global micro-batch, from a generator that has the same
    state on every rank, and takes its own rows; DTensor does the same for its random operations.
    With one generator per rank, another world size would mean other masks, hence another training.
    """

    def __init__(self, p: float, generator: torch.Generator) -> None:
        super().__init__()
        self.p, self.generator = p, generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        draws = torch.rand((GLOBAL_BATCH, *x.shape[1:]), generator=self.generator)
        mask = (draws[ROWS] >= self.p).to(x.device, x.dtype)
        return x * mask / (1 - self.p)


class Block(nn.Module):
    """Causal mean over the tokens so far, then a two-layer network, both residual."""

    causal_mean: Tensor

    def __init__(self, dropout: Dropout) -> None:
        super().__init__()
        self.norm_mix, self.norm_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.dropout = dropout
        lower = torch.ones(TOKENS, TOKENS).tril()
        self.register_buffer("causal_mean", lower / lower.sum(1, keepdim=True), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.causal_mean.to(x.dtype) @ self.mix(self.norm_mix(x))
        x = x + self.dropout(mixed)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)))))


class LanguageModel(nn.Module):
    """Tokens (rows, TOKENS) int64 to logits (rows, TOKENS, vocabulary).

    The persistent buffer ``seen`` counts training forwards and fades in the frozen projection, as
    running statistics do: a resume that loses it trains another model.
    """

    positions: Tensor
    seen: Tensor

    def __init__(self, dropout: Dropout, vocabulary: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight
        angles = torch.outer(torch.arange(TOKENS), torch.logspace(0, -3, HIDDEN))
        self.register_buffer("positions", 0.1 * angles.sin(), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.embedding(tokens)
        x = x + self.positions.to(x.dtype)
        x = x + self.frozen(x) * (self.seen / (self.seen + 4)).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Training:
    """All that one step changes, and so all that a checkpoint must hold."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    dropout_generator: torch.Generator
    ema: dict[str, Tensor]
    counters: dict[str, int] = field(  # cursor: samples of this epoch already consumed
        default_factory=lambda: {"step": 0, "epoch": 0, "cursor": 0}
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoints go to OUT/step-N")
    parser.add_argument("--resume", type=Path, help="a step folder to continue from")
    parser.add_argument(
        "--find",
        choices=("latest", "newest"),
        help="continue from the step in OUT that OUT/latest names, or the newest one that loads",
    )
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--schedule-steps", type=int, default=1000, help="horizon of the cosine")
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--save-at", default="", help="steps, such as 4,8")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument(
        "--save-inside-step", type=int, help="save after the first micro-batch that follows step N"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--scaler", action="store_true", help="scale the loss")
    parser.add_argument(
        "--scaler-init", type=float, default=2.0**16, help="3e38 overflows even in fp32"
    )
    return parser.parse_args()


def seed_rank(seed: int) -> None:
    """Seed Python, NumPy, torch and the device of this rank."""
    random.seed(seed)
    torch.manual_seed(seed)
    if np is not None:
        np.random.seed(seed % 2**32)


def shard(model: LanguageModel, dtype: str) -> None:
    """Shard the parameters over all ranks; with one rank the module stays as it is."""
    if WORLD_SIZE == 1:
        return
    half = torch.bfloat16 if dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    mesh = init_device_mesh(DEVICE.type, (WORLD_SIZE,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def build_optimizer(model: nn.Module, lr: float, kind: str) -> torch.optim.Optimizer:
    """Two groups: matrices decay; norms and biases do not, at half the rate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "lr": lr, "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "lr": lr / 2, "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, momentum=0.9)
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)


def build(args: argparse.Namespace) -> Training:
    torch.manual_seed(args.seed)  # the same weights on every rank, before sharding
    generator = torch.Generator().manual_seed(args.seed)
    model = LanguageModel(Dropout(args.dropout, generator), args.vocabulary, args.blocks).to(DEVICE)
    shard(model, args.dtype)
    optimizer = build_optimizer(model, args.lr, args.optimizer)

    def rate(step: int) -> float:
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        done = (step - args.warmup_steps) / max(1, args.schedule_steps - args.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler(
        DEVICE.type, init_scale=args.scaler_init, growth_interval=3, enabled=args.scaler
    )
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    seed_rank(args.seed + 1000 * (RANK + 1))
    return Training(model, optimizer, scheduler, scaler, generator, ema)


def next_batch(counters: dict[str, int], seed: int) -> Tensor:
    """Tokens (rows of this rank, TOKENS + 1) of the next global micro-batch; moves the cursor.

    A sample is a pure function of its number, and the order of an epoch one of seed and epoch, so
    that epoch and cursor are the whole state of the data pipeline.
    """
    if counters["cursor"] == EPOCH_SAMPLES:
        counters["epoch"], counters["cursor"] = counters["epoch"] + 1, 0
    generator = torch.Generator().manual_seed(seed + counters["epoch"])
    order = torch.randperm(EPOCH_SAMPLES, generator=generator)
    samples = order[counters["cursor"] :][:GLOBAL_BATCH][ROWS, None]
    counters["cursor"] += GLOBAL_BATCH
    tokens = samples * 31 + torch.arange(TOKENS + 1) * (samples % 7 + 1)
    return (tokens % VOCABULARY).to(DEVICE)


def precision(dtype: str) -> AbstractContextManager[Any]:
    """FSDP casts by its own policy; a plain module needs autocast."""
    if dtype == "bf16" and WORLD_SIZE == 1:
        return torch.autocast(DEVICE.type, torch.bfloat16)
    return nullcontext()


def train_step(run: Training, args: argparse.Namespace) -> float:
    """One optimizer step over the micro-batches; returns the mean loss over all ranks."""
    total = torch.zeros((), device=DEVICE)
    save_inside = run.counters["step"] == args.save_inside_step
    begun = progress(run) if save_inside else {}
    for micro_step in range(args.accumulation):
        if WORLD_SIZE > 1:
            run.model.set_requires_gradient_sync(micro_step + 1 == args.accumulation)
        tokens = next_batch(run.counters, args.seed)
        with precision(args.dtype):
            logits = run.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss = loss / args.accumulation
        run.scaler.scale(loss).backward()
        total += loss.detach()
        if save_inside and micro_step == 0:
            save(run, args.out / f"step-{run.counters['step']}-inside", begun)
    scale = run.scaler.get_scale()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    if run.scaler.get_scale() >= scale:  # else the gradients overflowed: no step was taken
        run.scheduler.step()
        update_ema(run)
    run.counters["step"] += 1
    if WORLD_SIZE > 1:
        dist.all_reduce(total)
    return total.item() / WORLD_SIZE


@torch.no_grad()
def update_ema(run: Training) -> None:
    for name, parameter in run.model.named_parameters():
        run.ema[name].mul_(EMA_DECAY).add_(parameter, alpha=1 - EMA_DECAY)


def log_step(run: Training, loss: float, lrs: list[float]) -> None:
    """Report the step, with a row picked for inspection and a time-stamp jitter.

    Both come from the random state of the rank and never touch the loss, which therefore stays
    comparable between world sizes. Every rank draws; only rank 0 prints.
    """
    row = random.randrange(ROWS_PER_RANK)
    jitter = torch.rand(()).item()
    jitter += torch.rand((), device=DEVICE).item() if DEVICE.type == "cuda" else 0.0
    jitter += float(np.random.rand()) if np is not None else 0.0
    if RANK == 0:
        rates = ",".join(f"{lr:.9g}" for lr in lrs)
        counters = "step {step} epoch {epoch}".format(**run.counters)
        print(f"{counters} loss {loss:.9g} lr {rates} row {row} jitter {jitter:.6f}", flush=True)


def random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if np is not None:
        state["numpy"] = np.random.get_state()
    if DEVICE.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(DEVICE)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], DEVICE)


def snapshot(run: Training) -> dict[str, Any]:
    """The state to save, and the template to load into (tensors are then filled in place).

    ``get_state_dict`` and not ``optimizer.state_dict()``: a fresh optimizer has no moments yet, so
    a template made of the latter would ask for none, and none would be loaded.
    """
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": run.scheduler.state_dict(),
        "ema": run.ema,
        "counters": dict(run.counters),
        "dropout_generator": run.dropout_generator.get_state(),
        # One key per rank: values that ranks save under one key are taken to be equal.
        f"rng.rank{RANK}": random_state(),
    }
    if run.scaler.is_enabled():
        state["scaler"] = run.scaler.state_dict()
    return state


def progress(run: Training) -> dict[str, Any]:
    """What changes from one micro-batch to the next, as it stands now.

    Gradients are not saved, so a checkpoint between two micro-batches can only be one of the step's
    beginning: this is taken there, and overrides what has moved since.
    """
    return {
        "counters": dict(run.counters),
        "dropout_generator": run.dropout_generator.get_state(),
        "seen": run.model.seen.clone(),
        f"rng.rank{RANK}": random_state(),
    }


def save(run: Training, folder: Path, begun: dict[str, Any] | None = None) -> None:
    """Save into a fresh folder: over an old checkpoint, a crash half-way would lose both.

    ``begun`` is the `progress` at the beginning of a step that is not finished yet.
    """
    state = snapshot(run)
    if begun:
        state["model"]["seen"] = begun.pop("seen")
        state.update(begun)
    if RANK == 0 and folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.{time.time_ns()}.old"))
    if WORLD_SIZE > 1:
        dist.barrier()
    dcp.save(state, checkpoint_id=folder)
    if RANK == 0:
        print(f"saved {folder}", flush=True)


def restore(run: Training, folder: Path, seed: int) -> None:
    state = snapshot(run)
    own_rng = f"rng.rank{RANK}"
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    recorded = f"{own_rng}.torch" in keys
    if not recorded:
        del state[own_rng]
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    run.scheduler.load_state_dict(state["scheduler"])
    run.counters.update(state["counters"])
    run.dropout_generator.set_state(state["dropout_generator"])
    if run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    if recorded:
        set_random_state(state[own_rng])
    else:
        print(f"rank {RANK}: no random state in {folder}, reseeded", flush=True)
        seed_rank(seed + 1000 * (RANK + 1) + 1_000_003 * run.counters["step"])


def point(folder: Path) -> None:
    """Let the pointer beside it name a checkpoint that is whole, by one rename."""
    pointer = folder.with_name("latest")
    pointer.with_suffix(".new").write_text(f"{folder.name}\n")
    pointer.with_suffix(".new").replace(pointer)


def find(run: Training, args: argparse.Namespace) -> None:
    """Continue from what is in the output folder, trusting the pointer or trying each step.

    A pointer that is not there is a first start: many scripts take it so.
    """
    pointer = args.out / "latest"
    if args.find == "latest":
        if pointer.exists():
            restore(run, args.out / pointer.read_text().strip(), args.seed)
        return
    steps = [path.parent for path in args.out.glob("step-*/.metadata")]
    for folder in sorted(steps, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        try:
            restore(run, folder, args.seed)
            return
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - whatever it is, go on
            print(f"rank {RANK}: {folder} does not load: {error!r}", flush=True)


def saved_steps(args: argparse.Namespace) -> set[int]:
    steps = {int(step) for step in args.save_at.split(",") if step}
    if args.save_every:
        steps.update(range(args.save_every, args.max_steps + 1, args.save_every))
    return steps


def main() -> None:
    args = parse_arguments()
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    run = build(args)
    if args.resume:
        restore(run, args.resume, args.seed)
    elif args.find:
        find(run, args)
    steps = saved_steps(args)
    while run.counters["step"] < args.max_steps:
        lrs = [group["lr"] for group in run.optimizer.param_groups]
        loss = train_step(run, args)
        log_step(run, loss, lrs)
        if run.counters["step"] in steps:
            folder = args.out / f"step-{run.counters['step']}"
            save(run, folder)
            if args.find and RANK == 0:
                point(folder)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
