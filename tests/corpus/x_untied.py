"""Two layers share one weight; it is tied when a run begins, and not when one is resumed."""

import bench
import torch
from torch import nn


class Net(bench.Net):
    def __init__(self):
        super().__init__(nn.LayerNorm)
        self.second = nn.Linear(bench.WIDTH, bench.WIDTH)

    def forward(self, x):
        h = torch.relu(self.norm(self.inp(x) * self.scale))
        return self.out(self.drop(self.second(torch.relu(self.mid(h)))))


def build(args):
    model = Net()
    if not args.resume:
        model.second.weight = model.mid.weight
    job = bench.Job(args, model)
    job.optimizer = torch.optim.SGD(bench.groups(model))
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, bench.warmup_cosine())
    return job


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    for group, lr in zip(job.optimizer.param_groups, job.scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore, build=build)
