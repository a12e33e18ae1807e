"""Train a small classifier whose ranks keep fast checkpoints in memory and durable ones on disk.

    torchrun --nproc-per-node 2 two_tiers.py --out runs/a --memory /dev/shm/a --save-every 8

Every rank writes its own file, STEP/rankR.pt, first under another name: to the memory of its host
every MEMORY_EVERY steps, to OUT every SAVE_EVERY. A resumed job asks every rank which steps it has,
on either tier, and takes the newest that all of them have. Gradients are averaged over the ranks;
the global batch is fixed and split over them.
"""

import argparse
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GLOBAL_BATCH = 8
FEATURES, CLASSES, EPOCH_SAMPLES = 24, 5, 48
ROWS = slice(RANK * GLOBAL_BATCH // WORLD_SIZE, (RANK + 1) * GLOBAL_BATCH // WORLD_SIZE)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="durable checkpoints: OUT/step-N")
    parser.add_argument("--memory", type=Path, required=True, help="fast ones: MEMORY/step-N")
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--memory-every", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--resume", action="store_true", help="fail when there is nothing to resume"
    )
    return parser.parse_args()


def batch(epoch, cursor):
    """Inputs and labels of this rank's rows; a sample is a pure function of its number."""
    order = torch.randperm(EPOCH_SAMPLES, generator=torch.Generator().manual_seed(epoch))
    numbers = order[cursor : cursor + GLOBAL_BATCH][ROWS]
    inputs = torch.stack(
        [torch.randn(FEATURES, generator=torch.Generator().manual_seed(int(n))) for n in numbers]
    )
    return inputs, numbers % CLASSES


def steps_on(tier):
    """The steps of which this rank has its file."""
    return {int(p.parent.name.removeprefix("step-")) for p in tier.glob(f"step-*/rank{RANK}.pt")}


def newest_of_all(tiers):
    """The newest step that every rank has on one tier or the other, 0 if there is none."""
    mine = set().union(*(steps_on(tier) for tier in tiers))
    everyones = [mine]
    if WORLD_SIZE > 1:
        everyones = [None] * WORLD_SIZE
        dist.all_gather_object(everyones, mine)
    return max(set.intersection(*everyones), default=0)


def save(state, tier, step):
    folder = tier / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"rank{RANK}.tmp")
    (folder / f"rank{RANK}.tmp").rename(folder / f"rank{RANK}.pt")


def load(tiers, step):
    """From the first tier that has it: memory comes first."""
    path = next(
        path for tier in tiers if (path := tier / f"step-{step}" / f"rank{RANK}.pt").exists()
    )
    print(f"rank {RANK} resumes from {path}", flush=True)
    return torch.load(path, weights_only=False)


def main():
    args = parse_arguments()
    tiers = (args.memory, args.out)
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 50))
    random.seed(RANK)
    torch.manual_seed(1000 + RANK)
    step, epoch, cursor = 0, 0, 0

    if args.resume:
        newest = newest_of_all(tiers)
        if newest == 0:
            raise SystemExit("told to resume, and no step is there for all ranks")
        state = load(tiers, newest)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step, epoch, cursor = state["step"], state["epoch"], state["cursor"]
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])

    while step < args.steps:
        if cursor == EPOCH_SAMPLES:
            epoch, cursor = epoch + 1, 0
        inputs, labels = batch(epoch, cursor)
        inputs = inputs * (1 + 0.01 * random.random())
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if WORLD_SIZE > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD_SIZE
        optimizer.step()
        scheduler.step()
        step, cursor = step + 1, cursor + GLOBAL_BATCH
        if RANK == 0:
            print(f"step {step} epoch {epoch} loss {loss.item():.6f}", flush=True)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": step,
            "epoch": epoch,
            "cursor": cursor,
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
        }
        if step % args.memory_every == 0:
            save(state, args.memory, step)
        if step % args.save_every == 0:
            save(state, args.out, step)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
