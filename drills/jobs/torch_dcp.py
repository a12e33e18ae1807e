"""Reference training job: torch.distributed.checkpoint in every layout, every state item in use.

An ordinary script of a small language model: torch, the standard library, and NumPy where it is
installed. It is here because a drill needs a job whose resume is right in every item: two parameter
groups, a frozen layer, a tied weight, buffers of both kinds, dropout, a schedule, gradient
accumulation, an average of the weights, a data cursor, a loss scaler, random state of each rank.

In order: start the process group if there is more than one rank; build the model from the seed and
lay it out; build optimizer, schedule and the rest; restore a checkpoint if asked; then train,
saving at the wanted steps. Run it with

    torchrun --nproc-per-node 2 torch_dcp.py --out runs/a --save-at 4,8 --max-steps 12
    torchrun --nproc-per-node 4 torch_dcp.py --out runs/b --resume runs/a/step-4 --max-steps 12
    torchrun --nproc-per-node 2 torch_dcp.py --out runs/a --find latest --save-at 16 --max-steps 20

Without further arguments that is FSDP2 over all ranks. `--wrapper fsdp1` chooses FSDP1, and the
degrees choose the rest: `--dp-replicate 2` is DDP, `--dp-replicate 2 --dp-shard 2` HSDP, `--tp 2`
tensor parallelism, `--pp 2 --movable --accumulation 2` a 1F1B pipeline; all but DDP combine. The
same seed gives the same training in every layout whose data-parallel degree divides the global
batch, up to the order in which floats are added.
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

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
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Where this rank stands: ranks count through tensor parallelism first, stages last."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def stage(self) -> int:
        return RANK // (self.dp * self.tp)

    @property
    def rows(self) -> slice:
        """This rank's rows of a global micro-batch; on 3 ranks 2 of 8 rows stay unused."""
        each, index = GLOBAL_BATCH // self.dp, RANK // self.tp % self.dp
        return slice(index * each, (index + 1) * each)

    def mesh(self) -> DeviceMesh:
        sizes = (self.pp, self.dp_replicate, self.dp_shard, self.tp)
        names = ("pp", "replicate", "shard", "tp")
        return init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)


class Dropout(nn.Module):
    """Dropout whose masks do not depend on the layout.

    Each rank draws the mask of the whole global micro-batch, from a generator that has the same
    state on every rank, and takes its own rows; DTensor does the same for its random operations.
    With one generator per rank, another world size would mean other masks, hence another training.
    Each block has a generator of its own, since its neighbours may be on another pipeline stage.
    """

    def __init__(self, p: float, seed: int, rows: slice) -> None:
        super().__init__()
        self.p, self.rows = p, rows
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        draws = torch.rand((GLOBAL_BATCH, *x.shape[1:]), generator=self.generator)
        mask = (draws[self.rows] >= self.p).to(x.device, x.dtype)
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

    def __init__(self, args: argparse.Namespace, rows: slice) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(args.vocabulary, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.blocks = nn.ModuleDict(
            {str(n): Block(Dropout(args.dropout, args.seed + n, rows)) for n in range(args.blocks)}
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.head: nn.Module | None = nn.Linear(HIDDEN, args.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        angles = torch.outer(torch.arange(TOKENS), torch.logspace(0, -3, HIDDEN))
        self.register_buffer("positions", 0.1 * angles.sin(), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def keep_stage(self, stage: int, stages: int) -> None:
        """Drop what other pipeline stages hold; what stays keeps its name."""
        names = list(self.blocks)
        kept = names[len(names) * stage // stages : len(names) * (stage + 1) // stages]
        for name in set(names) - set(kept):
            del self.blocks[name]
        if stage > 0:
            self.embedding = self.frozen = self.positions = self.seen = None
        if stage < stages - 1:
            self.norm = self.head = None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            if self.training:
                self.seen += 1
            x = self.embedding(x)
            x = x + self.positions.to(x.dtype)
            x = x + self.frozen(x) * (self.seen / (self.seen + 4)).to(x.dtype)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


@dataclass
class Training:
    """All that one step changes, and so all that a checkpoint must hold."""

    place: Place
    core: LanguageModel
    model: nn.Module  # `core` as data parallelism wraps it
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    average: nn.Module  # moving average of the weights, laid out like `model`
    options: StateDictOptions
    pipeline: Schedule1F1B | None = None
    saving: Any = None  # the asynchronous save in progress
    saving_group: Any = None
    pointing: Path | None = None  # what the pointer is to name when it is saved
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
    parser.add_argument("--async-save", action="store_true", help="write in the background")
    parser.add_argument(
        "--wrapper", choices=("fsdp2", "fsdp1", "ddp"), help="default: ddp for replicas alone"
    )
    parser.add_argument("--dp-replicate", type=int, default=1)
    parser.add_argument("--dp-shard", type=int, help="default: what the other degrees leave")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel degree")
    parser.add_argument(
        "--movable", action="store_true", help="save so that another pipeline degree can load"
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
    args = parser.parse_args()
    others = args.dp_replicate * args.tp * args.pp
    args.dp_shard = args.dp_shard or WORLD_SIZE // others
    replicas_alone = args.dp_replicate > 1 and args.dp_shard == 1
    args.wrapper = args.wrapper or ("ddp" if replicas_alone else "fsdp2")
    if others * args.dp_shard != WORLD_SIZE:
        parser.error(f"the degrees multiply to {others * args.dp_shard}, not to {WORLD_SIZE} ranks")
    if args.wrapper == "ddp" and args.dp_shard > 1:
        parser.error("DDP keeps whole replicas: give --dp-replicate, not --dp-shard")
    if args.pp > 1 and (not args.movable or args.accumulation < args.pp or args.scaler):
        parser.error("a pipeline needs --movable, a micro-batch per stage, and no loss scaler")
    return args


def seed_rank(seed: int) -> None:
    """Seed Python, NumPy, torch and the device of this rank."""
    random.seed(seed)
    torch.manual_seed(seed)
    if np is not None:
        np.random.seed(seed % 2**32)


def split_tensors(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Tensor parallelism: the two-layer networks by columns then rows, the vocabulary by rows."""
    plan: dict[str, Any] = {}
    for name in model.blocks:
        plan[f"blocks.{name}.up"] = ColwiseParallel(use_local_output=False)
        plan[f"blocks.{name}.down"] = RowwiseParallel()
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    if model.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def wrap(model: LanguageModel, args: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """The model as data parallelism wants it; with one replica the module stays as it is."""
    if args.dp_replicate * args.dp_shard == 1:
        return model
    if args.wrapper == "ddp":
        return DistributedDataParallel(model, process_group=mesh["replicate"].get_group())
    data_mesh = mesh["replicate", "shard"] if args.dp_replicate > 1 else mesh["shard"]
    half = torch.bfloat16 if args.dtype == "bf16" else None
    if args.wrapper == "fsdp1":
        hybrid = ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            model,
            device_mesh=data_mesh,
            sharding_strategy=hybrid if args.dp_replicate > 1 else ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=torch.float32),
            device_id=DEVICE,
            use_orig_params=True,
        )
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for block in model.blocks.values():
        fully_shard(block, mesh=data_mesh, mp_policy=policy)
    return fully_shard(model, mesh=data_mesh, mp_policy=policy)


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Two groups: matrices decay; norms and biases do not, at half the rate."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plain = {name for name in trained if "norm" in name or name.endswith("bias")}
    groups = [
        {
            "params": [p for name, p in trained.items() if name not in plain],
            "lr": args.lr,
            "weight_decay": 0.1,
        },
        {
            "params": [trained[name] for name in sorted(plain)],
            "lr": args.lr / 2,
            "weight_decay": 0.0,
        },
    ]
    # With tensor parallelism some parameters are DTensors and some are not: no common kernel.
    foreach = False if args.tp > 1 else None
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, foreach=foreach)
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6, foreach=foreach)


def build_model(args: argparse.Namespace, place: Place) -> tuple[LanguageModel, nn.Module]:
    torch.manual_seed(args.seed)  # the same weights on every rank, before they are laid out
    model = LanguageModel(args, place.rows).to(DEVICE)
    if args.pp > 1:
        model.keep_stage(place.stage, args.pp)
    mesh = place.mesh() if WORLD_SIZE > 1 else None
    if args.tp > 1:
        split_tensors(model, mesh["tp"])
    if not args.movable:
        model.tie()
    return model, model if mesh is None else wrap(model, args, mesh)


def build(args: argparse.Namespace) -> Training:
    place = Place(args.pp, args.dp_replicate, args.dp_shard, args.tp)
    core, model = build_model(args, place)
    average = build_model(args, place)[0 if args.wrapper == "ddp" else 1]  # begins as equal
    optimizer = build_optimizer(model, args)

    def rate(step: int) -> float:
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        done = (step - args.warmup_steps) / max(1, args.schedule_steps - args.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler(
        DEVICE.type, init_scale=args.scaler_init, growth_interval=3, enabled=args.scaler
    )
    options = StateDictOptions(flatten_optimizer_state_dict=args.movable)
    seed_rank(args.seed + 1000 * (RANK + 1))
    pipeline = build_pipeline(model, args, place) if args.pp > 1 else None
    return Training(place, core, model, optimizer, scheduler, scaler, average, options, pipeline)


def build_pipeline(model: nn.Module, args: argparse.Namespace, place: Place) -> Schedule1F1B:
    """The schedule of this stage.

    The stage is told the shapes: to find them out it would run a forward of its own, which draws
    dropout masks and moves ``seen``, in every process that starts.
    """

    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets) / args.accumulation

    rows = place.rows.stop - place.rows.start
    wrapped = args.dtype == "bf16" and place.dp > 1
    kind = torch.bfloat16 if wrapped else torch.float32
    hidden = torch.empty(rows, TOKENS, HIDDEN, dtype=kind, requires_grad=True)
    first, last = place.stage == 0, place.stage == args.pp - 1
    stage = PipelineStage(
        model,
        place.stage,
        args.pp,
        DEVICE,
        input_args=torch.empty(rows, TOKENS, dtype=torch.int64) if first else hidden,
        output_args=torch.empty(rows, TOKENS, args.vocabulary, requires_grad=True)
        if last
        else hidden,
        group=place.mesh()["pp"].get_group(),
    )
    return Schedule1F1B(stage, args.accumulation, loss_fn=mean_loss, scale_grads=False)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def next_batch(run: Training, seed: int) -> Tensor:
    """Tokens (rows of this rank, TOKENS + 1) of the next global micro-batch; moves the cursor.

    A sample is a pure function of its number, and the order of an epoch one of seed and epoch, so
    that epoch and cursor are the whole state of the data pipeline.
    """
    counters = run.counters
    if counters["cursor"] == EPOCH_SAMPLES:
        counters["epoch"], counters["cursor"] = counters["epoch"] + 1, 0
    generator = torch.Generator().manual_seed(seed + counters["epoch"])
    order = torch.randperm(EPOCH_SAMPLES, generator=generator)
    samples = order[counters["cursor"] :][:GLOBAL_BATCH][run.place.rows, None]
    counters["cursor"] += GLOBAL_BATCH
    tokens = samples * 31 + torch.arange(TOKENS + 1) * (samples % 7 + 1)
    return (tokens % VOCABULARY).to(DEVICE)


def precision(run: Training, dtype: str) -> AbstractContextManager[Any]:
    """FSDP casts by its own policy; a plain module needs autocast."""
    plain = run.place.dp == 1 or isinstance(run.model, DistributedDataParallel)
    return (
        torch.autocast(DEVICE.type, torch.bfloat16) if dtype == "bf16" and plain else nullcontext()
    )


def accumulating(run: Training, last: bool) -> AbstractContextManager[Any]:
    """Replicas exchange gradients with the last micro-batch only."""
    if isinstance(run.model, (DistributedDataParallel, FullyShardedDataParallel)):
        return nullcontext() if last else run.model.no_sync()
    if run.place.dp > 1:
        run.model.set_requires_gradient_sync(last)
    return nullcontext()


def forward_backward(run: Training, args: argparse.Namespace) -> Tensor:
    """Gradients of all micro-batches; returns the loss of this rank's rows."""
    if run.pipeline is not None:
        return pipelined(run, run.pipeline, args)
    total = torch.zeros((), device=DEVICE)
    save_inside = run.counters["step"] == args.save_inside_step
    begun = progress(run) if save_inside else {}
    for micro_step in range(args.accumulation):
        tokens = next_batch(run, args.seed)
        with accumulating(run, last=micro_step + 1 == args.accumulation):
            with precision(run, args.dtype):
                logits = run.model(tokens[:, :-1])
            loss = loss_of(logits, tokens[:, 1:]) / args.accumulation
            run.scaler.scale(loss).backward()
        total += loss.detach()
        if save_inside and micro_step == 0:
            save(run, args, f"step-{run.counters['step']}-inside", begun)
    return total


def pipelined(run: Training, pipeline: Schedule1F1B, args: argparse.Namespace) -> Tensor:
    """The same through the stages: the first gets the tokens, the last computes the loss."""
    tokens = torch.cat([next_batch(run, args.seed) for _ in range(args.accumulation)])
    losses: list[Tensor] = []
    with precision(run, args.dtype):
        if run.place.stage == 0:
            pipeline.step(tokens[:, :-1])
        elif run.place.stage == args.pp - 1:
            pipeline.step(target=tokens[:, 1:], losses=losses)
        else:
            pipeline.step()
    return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=DEVICE)


def train_step(run: Training, args: argparse.Namespace) -> float:
    """One optimizer step over the micro-batches; returns the mean loss over all replicas."""
    total = forward_backward(run, args)
    scale = run.scaler.get_scale()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    if run.scaler.get_scale() >= scale:  # else the gradients overflowed: no step was taken
        run.scheduler.step()
        update_average(run)
    run.counters["step"] += 1
    if WORLD_SIZE > 1:
        dist.all_reduce(total)
    return total.item() * args.pp / WORLD_SIZE


@torch.no_grad()
def update_average(run: Training) -> None:
    for average, now in zip(run.average.parameters(), run.model.parameters(), strict=True):
        average.mul_(EMA_DECAY).add_(now, alpha=1 - EMA_DECAY)


def log_step(run: Training, loss: float, lrs: list[float]) -> None:
    """Report the step, with a row picked for inspection and a time-stamp jitter.

    Both come from the random state of the rank and never touch the loss, which therefore stays
    comparable between world sizes. Every rank draws; only rank 0 prints.
    """
    row = random.randrange(GLOBAL_BATCH // run.place.dp)
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


def dropout_state(run: Training) -> dict[str, Tensor]:
    return {name: b.dropout.generator.get_state() for name, b in run.core.blocks.items()}


def snapshot(run: Training) -> dict[str, Any]:
    """The state to save, and the template to load into (tensors are then filled in place).

    ``get_state_dict`` and not ``optimizer.state_dict()``: a fresh optimizer has no moments yet, so
    a template made of the latter would ask for none, and none would be loaded.
    """
    model, optimizer = get_state_dict(run.model, run.optimizer, options=run.options)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": run.scheduler.state_dict(),
        "ema": get_model_state_dict(run.average),
        "counters": dict(run.counters),
        "dropout": dropout_state(run),
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
        "dropout": dropout_state(run),
        "seen": run.core.seen.clone(),
        f"rng.rank{RANK}": random_state(),
    }


def save(
    run: Training, args: argparse.Namespace, name: str, begun: dict[str, Any] | None = None
) -> None:
    """Save into a fresh folder: over an old checkpoint, a crash half-way would lose both.

    ``begun`` is the `progress` at the beginning of a step that is not finished yet.
    """
    folder = args.out / name
    state = snapshot(run)
    if begun:
        state["model"]["seen"] = begun.pop("seen")
        state.update(begun)
    finish_save(run)
    if RANK == 0 and folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.{time.time_ns()}.old"))
    if WORLD_SIZE > 1:
        dist.barrier()
    if args.async_save and run.saving_group is None:
        # A group of its own: the training's collectives must not meet those of the save.
        run.saving_group = dist.new_group(backend="gloo")
    run.pointing = folder if args.find else None
    if args.async_save:
        run.saving = dcp.async_save(state, checkpoint_id=folder, process_group=run.saving_group)
        return
    dcp.save(state, checkpoint_id=folder)
    finish_save(run)
    if RANK == 0:
        print(f"saved {folder}", flush=True)


def finish_save(run: Training) -> None:
    """Wait for a save in the background, and fail if it has failed; then it may be pointed to."""
    if run.saving is not None:
        run.saving.result()
    if run.pointing is not None and RANK == 0:
        point(run.pointing)
    run.saving = run.pointing = None


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
        options=run.options,
    )
    set_model_state_dict(run.average, state["ema"])
    run.scheduler.load_state_dict(state["scheduler"])
    run.counters.update(state["counters"])
    for name, block in run.core.blocks.items():
        block.dropout.generator.set_state(state["dropout"][name])
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
            save(run, args, f"step-{run.counters['step']}")
    finish_save(run)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
