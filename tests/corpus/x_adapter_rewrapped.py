"""The adapter is loaded, and then the model is wrapped with a new one."""

import bench
import torch
from torch import nn


class Adapter(nn.Module):
    """A frozen layer with a small trained correction, as LoRA does it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def build(args):
    model = bench.Net()
    model.mid = Adapter(model.mid)
    return bench.Job(args, model)


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.model.mid = Adapter(job.model.mid.base)
    job.optimizer = torch.optim.AdamW(bench.groups(job.model), betas=(0.9, 0.95))
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, bench.warmup_cosine())
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore, build=build)
