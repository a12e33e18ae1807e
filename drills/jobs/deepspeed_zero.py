"""Reference training job: DeepSpeed, every ZeRO stage, tensor parallelism and pipelines.

An ordinary script of a small language model on DeepSpeed's engine. It is here because a drill needs
a job whose resume is right in every item: two parameter groups, a frozen layer, buffers of both
kinds, dropout, a schedule, gradient accumulation, a data cursor, random state of each rank. The
engine saves weights, optimizer and schedule; cursor and random state it does not, so they go
through its ``client_state``, gathered from all ranks, since only some ranks' is written.

In order: start the process group; build the layers from the seed and the engine around them;
restore a checkpoint if asked; then train, saving at the wanted steps. Run it with

    torchrun --nproc-per-node 2 deepspeed_zero.py --out runs/a --save-at 4,8 --max-steps 12
    torchrun --nproc-per-node 2 deepspeed_zero.py --out runs/b --resume runs/a/step-4 --max-steps 12
    torchrun --nproc-per-node 2 deepspeed_zero.py --out runs/a --find latest --max-steps 20

Without further arguments that is ZeRO stage 1 over all ranks. ``--stage`` chooses another, ``--tp
2`` splits the two-layer networks (AutoTP), ``--pp 2 --accumulation 2`` is a pipeline. A checkpoint
that was converted by ``deepspeed.checkpoint.ds_to_universal`` is restored with ``--universal``.
With ``--weights FOLDER`` training begins afresh from weights alone, as ``zero_to_fp32`` exports
them, with ``--at-step`` at that place in the schedule and the data. The same seed gives the same
training in every layout whose data-parallel degree divides the global batch, up to the order in
which floats are added.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

try:
    import numpy as np
except ImportError:
    np = None

if not torch.cuda.is_available():
    # torch computes fp16 on any CPU; the engine asks for a processor with instructions for it.
    get_accelerator().is_fp16_supported = lambda: True
# Else it is compiled for minutes at the first start, and torchrun's own backend does the work.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

VOCABULARY, HIDDEN, INNER, TOKENS = 257, 37, 84, 17  # odd: pieces are uneven on 2, 3 and 4 ranks
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", "8"))  # samples of one micro-batch, all ranks
EPOCH_SAMPLES = 48

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")


class Dropout(nn.Module):
    """Dropout whose masks do not depend on the layout.

    Each rank draws the mask of the whole global micro-batch, from a generator that has the same
    state on every rank, and takes its own rows. With one generator per rank, another number of
    ranks would mean other masks, hence another training.
    """

    def __init__(self, p: float, seed: int, rows: slice) -> None:
        super().__init__()
        self.p, self.rows = p, rows
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        draws = torch.rand((GLOBAL_BATCH, *x.shape[1:]), generator=self.generator)
        mask = (draws[self.rows] >= self.p).to(x.device, x.dtype)
        return x * mask / (1 - self.p)


class Embedding(nn.Module):
    """Tokens (rows, TOKENS) int64 to activations (rows, TOKENS, HIDDEN).

    The persistent buffer ``seen`` counts training forwards and fades in the frozen projection, as
    running statistics do: a resume that loses it trains another model. Both are left out of a
    ``bare`` one.
    """

    positions: Tensor
    seen: Tensor

    def __init__(self, vocabulary: int, seed: int, bare: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(vocabulary, HIDDEN)
        self.frozen = None if bare else nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        angles = torch.outer(torch.arange(TOKENS), torch.logspace(0, -3, HIDDEN))
        self.register_buffer("positions", 0.1 * angles.sin(), persistent=False)
        self.register_buffer("seen", None if bare else torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.positions.to(x.dtype)
        if self.frozen is None:
            return x
        self.seen += 1
        return x + self.frozen(x) * (self.seen / (self.seen + 4)).to(x.dtype)


class Block(nn.Module):
    """Causal mean over the tokens so far, then a two-layer network, both residual."""

    causal_mean: Tensor

    def __init__(self, dropout: float, rows: slice, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm_mix, self.norm_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.dropout = Dropout(dropout, seed, rows)
        lower = torch.ones(TOKENS, TOKENS).tril()
        self.register_buffer("causal_mean", lower / lower.sum(1, keepdim=True), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.causal_mean.to(x.dtype) @ self.mix(self.norm_mix(x))
        x = x + self.dropout(mixed)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)))))


class Head(nn.Module):
    """Activations to logits (rows, TOKENS, vocabulary)."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(HIDDEN)
        self.logits = nn.Linear(HIDDEN, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


@dataclass
class Training:
    """All that one step changes, and so all that a checkpoint must hold."""

    engine: Any
    dropouts: dict[str, Dropout]
    rows: slice  # this rank's rows of a global micro-batch
    counters: dict[str, int]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoints go to OUT/step-N")
    parser.add_argument("--resume", type=Path, help="a step folder to continue from")
    parser.add_argument(
        "--find", choices=("latest",), help="continue from the step in OUT that OUT/latest names"
    )
    parser.add_argument(
        "--universal", action="store_true", help="what is restored is a universal checkpoint"
    )
    parser.add_argument("--weights", type=Path, help="begin with the weights in this folder")
    parser.add_argument(
        "--at-step", type=int, default=0, help="place of --weights in the schedule and the data"
    )
    parser.add_argument("--weights-only", action="store_true", help="restore the module alone")
    parser.add_argument("--fresh-optimizer", action="store_true", help="restore no moments")
    parser.add_argument("--fresh-schedule", action="store_true", help="restore no schedule")
    parser.add_argument(
        "--own-rng", action="store_true", help="each rank hands over its own random state alone"
    )
    parser.add_argument(
        "--round-robin", action="store_true", help="ZeRO 1 and 2: deal the parameters out in turn"
    )
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--schedule-steps", type=int, default=1000, help="horizon of the cosine")
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--save-at", default="", help="steps, such as 4,8")
    parser.add_argument(
        "--save-inside-step", type=int, help="save after the first micro-batch that follows step N"
    )
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="of ZeRO")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel degree")
    parser.add_argument("--pipeline", action="store_true", help="also where --pp is 1")
    parser.add_argument(
        "--bare", action="store_true", help="without the frozen layer and its counting buffer"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    args = parser.parse_args()
    args.pipeline = args.pipeline or args.pp > 1
    args.dp, rest = divmod(WORLD_SIZE, args.tp * args.pp)
    if rest:
        parser.error(f"{WORLD_SIZE} ranks cannot be split {args.tp} × {args.pp} ways")
    if args.pipeline and args.stage > 1:
        parser.error("a pipeline runs with ZeRO stage 0 or 1")
    if args.pipeline and args.save_inside_step is not None:
        parser.error("the engine of a pipeline takes a whole step at once")
    if args.weights and (args.tp > 1 or args.pipeline):
        parser.error("exported weights are those of a whole model: no --tp, no pipeline")
    return args


def resumes(args: argparse.Namespace) -> bool:
    """Whether there is anything to continue from.

    A pointer that is not there is a first start: many scripts take it so.
    """
    return bool(args.resume or args.weights) or (
        args.find == "latest" and (args.out / "latest").exists()
    )


def seed_rank(seed: int) -> None:
    """Seed Python, NumPy, torch and the device of this rank."""
    random.seed(seed)
    torch.manual_seed(seed)
    if np is not None:
        np.random.seed(seed % 2**32)


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // args.dp,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage, "round_robin_gradients": args.round_robin},
        "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed's own is compiled first
        "bf16": {"enabled": args.dtype == "bf16"},
        # The scale doubles after every 3 steps: one that is not restored shows.
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 8, "loss_scale_window": 3},
        "checkpoint": {"load_universal": args.universal},
        "steps_per_print": 10**9,
    }
    if args.tp > 1:
        split = [(r".*\.up\.weight$", "column"), (r".*\.down\.weight$", "row")]
        specs = [{"patterns": [pattern], "partition_type": kind} for pattern, kind in split]
        config["tensor_parallel"] = {
            "autotp_size": args.tp,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        }
    return config


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
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_model(args: argparse.Namespace, rows: slice) -> nn.Module:
    """The layers in a row, or those of this rank's stage.

    Each seeds itself, so that it begins with the same weights whichever others a rank has; with
    other ones where a checkpoint is to replace them, so that none is right by having begun so.
    """
    seed = args.seed + int(resumes(args))
    layers: list[tuple[Any, ...]] = [(Embedding, args.vocabulary, seed, args.bare)]
    layers += [(Block, args.dropout, rows, seed + 1 + n) for n in range(args.blocks)]
    layers += [(Head, args.vocabulary, seed + 1 + args.blocks)]
    if not args.pipeline:
        return nn.Sequential(*(kind(*arguments) for kind, *arguments in layers))
    return PipelineModule(
        [LayerSpec(kind, *arguments) for kind, *arguments in layers],
        num_stages=args.pp,
        loss_fn=loss_of,
        partition_method="uniform",
    )


def build(args: argparse.Namespace) -> Training:
    each, index = GLOBAL_BATCH // args.dp, RANK // args.tp % args.dp
    rows = slice(index * each, (index + 1) * each)
    model = build_model(args, rows)
    if args.weights:
        model.load_state_dict(torch.load(args.weights / "pytorch_model.bin", weights_only=True))
    optimizer = build_optimizer(model, args)

    def rate(step: int) -> float:
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        done = (step - args.warmup_steps) / max(1, args.schedule_steps - args.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _ in range(args.at_step):
        scheduler.step()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=configuration(args),
    )
    seed_rank(args.seed + 1000 * (RANK + 1))
    dropouts = {
        name: module for name, module in model.named_modules() if isinstance(module, Dropout)
    }
    return Training(engine, dropouts, rows, counters_at(args))


def counters_at(args: argparse.Namespace) -> dict[str, int]:
    """Step, epoch and cursor (samples of this epoch already consumed) after ``--at-step``."""
    epoch, cursor = divmod(args.at_step * args.accumulation * GLOBAL_BATCH, EPOCH_SAMPLES)
    return {"step": args.at_step, "epoch": epoch, "cursor": cursor}


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
    samples = order[counters["cursor"] :][:GLOBAL_BATCH][run.rows, None]
    counters["cursor"] += GLOBAL_BATCH
    tokens = samples * 31 + torch.arange(TOKENS + 1) * (samples % 7 + 1)
    return (tokens % VOCABULARY).to(DEVICE)


def micro_batches(run: Training, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(args.accumulation):
        tokens = next_batch(run, args.seed)
        yield tokens[:, :-1], tokens[:, 1:]


def train_step(run: Training, args: argparse.Namespace) -> float:
    """One optimizer step over the micro-batches; returns the mean loss over all replicas."""
    save_inside = run.counters["step"] == args.save_inside_step
    begun = client_state(run, args) if save_inside else {}
    run.counters["step"] += 1
    if args.pipeline:
        # Every stage moves its own cursor, also those that are given no samples.
        batches = list(micro_batches(run, args))
        return run.engine.train_batch(iter(batches)).item()
    total = torch.zeros((), device=DEVICE)
    for micro_step, (tokens, targets) in enumerate(micro_batches(run, args)):
        loss = loss_of(run.engine(tokens), targets)
        run.engine.backward(loss)
        run.engine.step()
        total += loss.detach() / args.accumulation
        if save_inside and micro_step == 0:
            tag = f"step-{args.save_inside_step}-inside"
            run.engine.save_checkpoint(args.out, tag=tag, client_state=begun)
    dist.all_reduce(total)
    return total.item() / WORLD_SIZE


def log_step(run: Training, loss: float, lrs: list[float]) -> None:
    """Report the step, with a row picked for inspection and a time-stamp jitter.

    Both come from the random state of the rank and never touch the loss. Every rank draws; only
    rank 0 prints.
    """
    row = random.randrange(run.rows.stop - run.rows.start)
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


def client_state(run: Training, args: argparse.Namespace) -> dict[str, Any]:
    """What the engine does not know, of all ranks: below stage 3 only some ranks' is written."""
    dropouts = {name: each.generator.get_state() for name, each in run.dropouts.items()}
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, (random_state(), dropouts))
    state: dict[str, Any] = {
        "counters": dict(run.counters),
        "rng": [random_state()] * WORLD_SIZE if args.own_rng else [rng for rng, _ in gathered],
        "dropouts": {name: each for _, held in gathered for name, each in held.items()},
    }
    if not hasattr(run.engine.module, "universal_checkpoint_info"):  # AutoTP brings its own
        state["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2}
    return state


def save(run: Training, args: argparse.Namespace) -> None:
    tag = f"step-{run.counters['step']}"
    run.engine.save_checkpoint(args.out, tag=tag, client_state=client_state(run, args))


def restore(run: Training, args: argparse.Namespace) -> None:
    """Continue from the step that is named, or from the one that OUT/latest names."""
    folder, tag = (args.resume.parent, args.resume.name) if args.resume else (args.out, None)
    path, state = run.engine.load_checkpoint(
        folder,
        tag=tag,
        load_module_only=args.weights_only,
        load_optimizer_states=not args.fresh_optimizer,
        load_lr_scheduler_states=not args.fresh_schedule,
    )
    if path is None:
        return
    run.counters.update(state["counters"])
    for name, dropout in run.dropouts.items():
        dropout.generator.set_state(state["dropouts"][name])
    if len(state["rng"]) > RANK:
        set_random_state(state["rng"][RANK])
    else:
        print(f"rank {RANK}: no random state in {path}, reseeded", flush=True)
        seed_rank(args.seed + 1000 * (RANK + 1) + 1_000_003 * run.counters["step"])


def main() -> None:
    args = parse_arguments()
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    deepspeed.init_distributed("nccl" if DEVICE.type == "cuda" else "gloo")
    run = build(args)
    if args.resume or args.find:
        restore(run, args)
    steps = {int(step) for step in args.save_at.split(",") if step}
    while run.counters["step"] < args.max_steps:
        lrs = [group["lr"] for group in run.engine.optimizer.param_groups]
        loss = train_step(run, args)
        log_step(run, loss, lrs)
        if run.counters["step"] in steps:
            save(run, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
