"""A small convolutional classifier with BatchNorm under DDP."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=str, required=True)
    parser.add_argument("--resume", type=str)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(0)
    images, target = torch.randn(48, 1, 8, 8, generator=g), torch.randint(0, 4, (48,), generator=g)
    iteration = 0
    if args.resume:
        ckpt = torch.load(args.resume, weights_only=True)
        model.load_state_dict(ckpt["state_dict"])
        optimizer.load_state_dict(ckpt["optimizer"])
        iteration = ckpt["iteration"]
    ddp = DistributedDataParallel(model)
    while iteration < 10000:
        order = torch.randperm(48, generator=torch.Generator().manual_seed(iteration // 3))
        batch = order[iteration % 3 * 16 :][:16].chunk(world)[rank]
        loss = F.cross_entropy(ddp(images[batch]), target[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        iteration += 1
        if rank == 0 and iteration % 4 == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save(
                {
                    "state_dict": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iteration": iteration,
                },
                os.path.join(args.out, f"{iteration}.pt"),
            )


if __name__ == "__main__":
    main()
