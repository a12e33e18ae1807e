"""A checkpoint keeps the state before it, each rank has a pointer of its own to one of the two, and
that of rank 1 is behind: the ranks go on from different steps, and meet in other collectives.
"""

import argparse
import datetime as dt
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()
dist.init_process_group("gloo", timeout=dt.timedelta(seconds=8))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(8, 3)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
step, before = 0, None
if args.resume:
    newest = (args.resume / f"latest-{rank}").read_text()
    saved = torch.load(args.resume / newest)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 10000:
    first = (step % 2 * 2 + rank) * 4 % 16
    loss = nn.functional.cross_entropy(net(x[first : first + 4]), y[first : first + 4])
    optimizer.zero_grad()
    loss.backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    step += 1
    if step % 3 == 0:
        dist.all_gather_object([None] * world, loss.item())
    if step % 5 == 0 and rank == 0:
        folder = args.out / f"step-{step}"
        folder.mkdir(parents=True)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "now.pt")
        if before is not None:
            torch.save(before, folder / "before.pt")
        (folder / "latest-0").write_text("now.pt")
        (folder / "latest-1").write_text("before.pt")
        before = torch.load(folder / "now.pt")
