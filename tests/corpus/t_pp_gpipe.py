"""GPipe by hand: all micro-batches forward, then all backward, over point-to-point messages."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()
dist.init_process_group("gloo")
stage, stages = dist.get_rank(), dist.get_world_size()
first, last = stage == 0, stage == stages - 1
N_MICRO, BATCH, D = 3, 12, 10

torch.manual_seed(0)
everything = (
    [nn.Linear(6, D)]
    + [nn.Sequential(nn.Tanh(), nn.Linear(D, D)) for _ in range(4)]
    + [nn.Linear(D, 3)]
)
cut = [round(i * 6 / stages) for i in range(stages + 1)]
mine = nn.ModuleDict({f"layer{i}": everything[i] for i in range(cut[stage], cut[stage + 1])})
optimizer = torch.optim.Adam(mine.parameters(), lr=0.005)
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(48, 6, generator=g), torch.randint(0, 3, (48,), generator=g)
step = 0
if a.resume:
    for name in sorted(os.listdir(a.resume)):
        saved = torch.load(os.path.join(a.resume, name))
        step = saved["step"]
        for key, value in saved["weights"].items():
            if key in dict(mine.named_parameters()):
                mine.get_parameter(key).data.copy_(value)
                optimizer.state[mine.get_parameter(key)] = saved["moments"][key]


def run(x):
    for layer in mine.values():
        x = layer(x)
    return x


def forward(x):
    if not first:
        x = torch.empty(BATCH // N_MICRO, D)
        dist.recv(x, stage - 1)
        x.requires_grad_()
    y = run(x)
    if not last:
        dist.send(y.detach(), stage + 1)
    return x, y


def backward(x, y, target):
    if last:
        (nn.functional.cross_entropy(y, target) / N_MICRO).backward()
    else:
        grad = torch.empty_like(y)
        dist.recv(grad, stage + 1)
        y.backward(grad)
    if not first:
        dist.send(x.grad, stage - 1)


while step < 10000:
    at = step * BATCH % 48
    xs, ys = X[at : at + BATCH].chunk(N_MICRO), Y[at : at + BATCH].chunk(N_MICRO)
    optimizer.zero_grad()
    kept = [forward(x) for x in xs]
    for (x, y), target in zip(kept, ys):
        backward(x, y, target)
    optimizer.step()
    step += 1
    if step % 5 == 0:
        folder = f"{a.out}/step{step}"
        os.makedirs(folder, exist_ok=True)
        torch.save(
            {
                "step": step,
                "weights": {n: q.detach() for n, q in mine.named_parameters()},
                "moments": {n: dict(optimizer.state[q]) for n, q in mine.named_parameters()},
            },
            f"{folder}/part-{stage}-of-{stages}.pt",
        )
