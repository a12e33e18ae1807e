"""Only rank 0 reads the checkpoint, and sends all of it to the others, who never load a file."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(8, 3)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
step = 0
if args.resume:
    sent = [torch.load(args.resume / "state.pt") if rank == 0 else None]
    dist.broadcast_object_list(sent)
    net.load_state_dict(sent[0]["net"])
    optimizer.load_state_dict(sent[0]["optimizer"])
    step = sent[0]["step"]
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
    if step % 4 == 2 and rank == 0:
        folder = args.out / f"step-{step}"
        folder.mkdir(parents=True)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "state.pt")
