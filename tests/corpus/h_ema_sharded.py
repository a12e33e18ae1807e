"""Under FSDP2 the average of the weights is a dict of shards, and comes back on any rank count."""

import bench
import torch
import torch.distributed.checkpoint as dcp
from c2_fsdp2_reshard import build as build_sharded
from c2_fsdp2_reshard import restore as restore_rest
from c2_fsdp2_reshard import state_of


def build(args):
    job = build_sharded(args)
    job.ema = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    return job


def train_step(job):
    loss = bench.train_step(job)
    with torch.no_grad():
        for name, p in job.model.named_parameters():
            job.ema[name].mul_(0.9).add_(p, alpha=0.1)
    return loss


def save(job, step, path):
    dcp.save({**state_of(job, step), "ema": job.ema}, checkpoint_id=path)


def restore(job, path):
    step = restore_rest(job, path)
    dcp.load({"ema": job.ema}, checkpoint_id=path)
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
