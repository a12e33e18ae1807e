"""SGD without momentum has no state: there is nothing to lose."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.optimizer = torch.optim.SGD(bench.groups(job.model))
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, bench.warmup_cosine())
    return job


if __name__ == "__main__":
    bench.run(build=build)
