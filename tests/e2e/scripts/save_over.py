"""Train a small network and save it at one path, again and again, in one of four ways.

    torchrun --nproc-per-node 2 save_over.py --out runs/a --how dcp --save-at 4,8

`dcp` saves over the same folder, `async` does so behind the training, `naive` calls torch.save on
the same file, and `careful` writes a new file, flushes it to disk and renames it over the old one.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS, WIDTH = 8, 24
EPOCH_STEPS = 3


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--resume", type=Path)
    p.add_argument("--how", choices=("dcp", "async", "naive", "careful"), required=True)
    p.add_argument("--save-at", default="")
    p.add_argument("--steps", type=int, default=400)
    return p.parse_args()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step: the same in every process, and again in every epoch."""
    g = torch.Generator().manual_seed(1000 + step % EPOCH_STEPS)
    x = torch.randn(ROWS, WIDTH, generator=g)
    return x, x.roll(1, 1).tanh()


class Job:
    """Everything that is saved, and the two ways to put it on disk."""

    def __init__(self, how: str) -> None:
        torch.manual_seed(3)
        self.how = how
        self.group = dist.new_group() if how == "async" else None  # its own, beside the training's
        self.pending: Any = None
        self.step = 0
        self.rank = dist.get_rank()
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 40), nn.Tanh(), nn.Dropout(0.1), nn.Linear(40, WIDTH)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        torch.manual_seed(17 + self.rank)

    def state(self) -> dict[str, Any]:
        rng: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rng, torch.get_rng_state())
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "rng": torch.stack(rng),
        }

    def save(self, path: Path) -> None:
        state = self.state()
        if self.how == "dcp":
            dcp.save(state, checkpoint_id=path)
        elif self.how == "async":
            if self.pending is not None:
                self.pending.result()
            self.pending = dcp.async_save(state, checkpoint_id=path, process_group=self.group)
        elif self.rank == 0 and self.how == "naive":
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
        elif self.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".tmp")
            with beside.open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
            beside.replace(path)
        dist.barrier()

    def load(self, path: Path) -> None:
        if self.how in ("dcp", "async"):
            for p in self.model.parameters():  # the moments exist once the optimizer has stepped
                p.grad = torch.zeros_like(p)
            rates = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
            self.optimizer.step()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self.optimizer.zero_grad()
            state = self.state()
            dcp.load(state, checkpoint_id=path)
        else:
            state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"][self.rank].clone())


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    job = Job(args.how)
    if args.resume:
        job.load(args.resume)
    net = DistributedDataParallel(job.model)
    share = ROWS // dist.get_world_size()
    rows = slice(job.rank * share, (job.rank + 1) * share)
    saved = {int(step) for step in args.save_at.split(",") if step}
    while job.step < args.steps:
        x, y = batch(job.step)
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.scheduler.step()
        job.step += 1
        if job.step in saved:
            job.save(args.out / "checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
