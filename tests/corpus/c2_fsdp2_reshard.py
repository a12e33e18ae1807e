"""FSDP2 with odd sizes through DCP state dicts, a global batch of 8 by mean, any rank count."""

import os

import bench
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 12)
        self.inp = nn.Linear(bench.FEATURES + 12, 17)
        self.out = nn.Linear(17, bench.CLASSES)

    def forward(self, x):
        token = (x[:, 0].abs() * 10).long() % 37
        return self.out(torch.tanh(self.inp(torch.cat([x, self.embed(token)], 1))))


def build(args):
    if not dist.is_initialized():
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(bench.SEED)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(Net(), mesh=mesh)
    return bench.Job(args, model, parallel=lambda model: model, batch=BATCH)


def state_of(job, step):
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": job.scheduler.state_dict()}
    return state | {"loader": job.loader.state_dict(), "step": step}


def save(job, step, path):
    dcp.save(state_of(job, step), checkpoint_id=path)


def restore(job, path):
    state = state_of(job, 0)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    job.scheduler.load_state_dict(state["scheduler"])
    job.loader.load_state_dict(state["loader"])
    return state["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
