"""AMSGrad keeps the largest second moments, and they come back."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.optimizer = torch.optim.AdamW(bench.groups(job.model), betas=(0.9, 0.95), amsgrad=True)
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, bench.warmup_cosine())
    return job


if __name__ == "__main__":
    bench.run(build=build)
