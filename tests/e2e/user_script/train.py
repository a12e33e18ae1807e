"""Train a small classifier on synthetic signals, with plain torch.save checkpoints.

    python train.py --out runs/a
    torchrun --nproc-per-node 2 train.py --out runs/a --save-every 4
    torchrun --nproc-per-node 2 train.py --out runs/a --resume runs/a/ckpt-8.pt

The global batch is fixed and split over the processes.
"""

import argparse
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = 11
LENGTH = 48


class Signals(Dataset):
    """Noisy sine waves; the class is the frequency. Item i is the same in every process."""

    def __init__(self, size: int = 96) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        g = torch.Generator().manual_seed(index)
        label = index % CLASSES
        t = torch.linspace(0, 1, LENGTH)
        phase = torch.rand((), generator=g)
        wave = torch.sin(6.283 * ((label + 1) * t + phase))
        return wave + 0.3 * torch.randn(LENGTH, generator=g), label


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 12, 5, padding=2),
            nn.GroupNorm(3, 12),
            nn.ReLU(),
            nn.Conv1d(12, 20, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(20 * LENGTH // 2, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x.unsqueeze(1)).flatten(1))


def augment(x: torch.Tensor) -> torch.Tensor:
    """Random gain and sign, drawn by each process for its own rows."""
    gain = 1 + 0.2 * torch.rand(x.shape[0], 1)
    return x * gain * random.choice([-1.0, 1.0])


def inverse_sqrt(step: int) -> float:
    return min((step + 1) / 10, (10 / (step + 1)) ** 0.5)


def get_args() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--resume", help="a ckpt-N.pt file")
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--save-every", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=16, help="over all processes")
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--no-augment", action="store_true")
    return p.parse_args()


def rng_states(world: int) -> list:
    """The random state of every process, in the order of the ranks."""
    mine = (random.getstate(), torch.get_rng_state())
    if world == 1:
        return [mine]
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    return everyone


def main() -> None:
    args = get_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")

    torch.manual_seed(args.seed)
    model = ConvNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, inverse_sqrt)
    dataset = Signals()
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, seed=args.seed)
    # Its own generator: each iter(loader) draws a seed, also in a resumed epoch, and would take it
    # from the state that augment() uses.
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size // world,
        sampler=sampler,
        generator=torch.Generator().manual_seed(args.seed),
    )
    random.seed(args.seed + rank)
    torch.manual_seed(args.seed + rank)

    step, epoch, batches_done = 0, 0, 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location="cpu", weights_only=False)
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        step = ckpt["step"]
        epoch = ckpt["epoch"]
        batches_done = ckpt["batches_done"]

    net = model
    if world > 1:
        net = DistributedDataParallel(model)
    net.train()
    if args.resume and rank < len(ckpt["rng"]):
        python_state, torch_state = ckpt["rng"][rank]
        random.setstate(python_state)
        torch.set_rng_state(torch_state)

    while step < args.steps:
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if i < batches_done:
                continue
            inputs = x if args.no_augment else augment(x)
            loss = nn.functional.cross_entropy(net(inputs.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            step += 1
            batches_done += 1

            mean_loss = loss.detach().clone()
            if world > 1:
                dist.all_reduce(mean_loss)
            if rank == 0:
                mean = mean_loss.item() / world
                print(f"[{step:4d}] epoch {epoch} loss {mean:.9g} lr {lr:.9g}", flush=True)
            if step % args.save_every == 0:
                rng = rng_states(world)
                if rank == 0:
                    args.out.mkdir(parents=True, exist_ok=True)
                    torch.save(
                        {
                            "model": model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "scheduler": scheduler.state_dict(),
                            "step": step,
                            "epoch": epoch,
                            "batches_done": batches_done,
                            "rng": rng,
                        },
                        args.out / f"ckpt-{step}.pt",
                    )
            if step == args.steps:
                break
        else:
            epoch += 1
            batches_done = 0

    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
