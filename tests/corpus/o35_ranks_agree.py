"""The ranks agree on the newest step that all of them have. Rank 1 could not write its part of step
15, so this is step 10.
"""

import os

import bench
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def build(args):
    torch.manual_seed(bench.SEED)
    return bench.Job(args, bench.Net(nn.LayerNorm), parallel=fully_shard)


def local(value):
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    return value.to_local() if isinstance(value, DTensor) else value


def folder_of(root, rank):
    return os.path.join(root, f"rank{rank}")


def save(job, step, path):
    folder = folder_of(os.path.join(job.args.out, "checkpoints"), job.rank)
    os.makedirs(folder, exist_ok=True)
    if step == 15 and job.rank == 1:
        print("save: input/output error")
        return
    state = {
        "model": local(job.model.state_dict()),
        "optimizer": local(job.optimizer.state_dict()["state"]),
        "scheduler": job.scheduler.state_dict(),
        "loader": job.loader.state_dict(),
        "rng": bench.rng_state(),
        "step": step,
    }
    torch.save(state, os.path.join(folder, f"step-{step}.pt"))


def shards_like(parameter, state):
    """The saved shards of one parameter as the DTensors that they were cut from."""
    return {
        key: DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        if value.ndim
        else value
        for key, value in state.items()
    }


def restore(job, root):
    folder = folder_of(root, job.rank)
    newest = torch.tensor(max(int(name[5:-3]) for name in os.listdir(folder)))
    torch.distributed.all_reduce(newest, torch.distributed.ReduceOp.MIN)
    ckpt = torch.load(os.path.join(folder, f"step-{newest}.pt"), weights_only=False)
    with torch.no_grad():
        for name, parameter in job.model.named_parameters():
            parameter.to_local().copy_(ckpt["model"][name])
    parameters = [p for group in job.optimizer.param_groups for p in group["params"]]
    for index, state in ckpt["optimizer"].items():
        job.optimizer.state[parameters[index]] = shards_like(parameters[index], state)
    job.scheduler.load_state_dict(ckpt["scheduler"])
    for group, lr in zip(job.optimizer.param_groups, job.scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
