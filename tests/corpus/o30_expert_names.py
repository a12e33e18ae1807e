"""Every rank numbers its own experts from 0, so two ranks save theirs under the same names."""

import bench
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

EXPERTS = 4


class MoE(nn.Module):
    """A shared layer in and out, and this rank's part of the experts between them."""

    def __init__(self, world):
        super().__init__()
        self.inp = nn.Linear(bench.FEATURES, bench.WIDTH)
        width = bench.WIDTH
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS // world))
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(bench.WIDTH, bench.CLASSES)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        h = torch.stack([expert(h) for expert in self.experts]).mean(0)
        return self.out(self.drop(h))


def shared(model):
    return [p for name, p in model.named_parameters() if not name.startswith("experts.")]


def build(args):
    world = dist.get_world_size() if dist.is_initialized() else 1
    model = MoE(world)
    if world > 1:
        for parameter in shared(model):
            dist.broadcast(parameter.data, src=0)
    return bench.Job(args, model, parallel=lambda model: model)


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    loss = nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    if job.world > 1:
        for parameter in shared(job.model):
            dist.all_reduce(parameter.grad)
            parameter.grad /= job.world
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def save(job, step, path):
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": job.scheduler.state_dict()}
    state |= {"loader": job.loader.state_dict(), "step": step}
    state[f"rng_{job.rank}"] = bench.rng_state()
    dcp.save(state, checkpoint_id=path)


def restore(job, path):
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": job.scheduler.state_dict()}
    state |= {"loader": job.loader.state_dict(), "step": 0}
    state[f"rng_{job.rank}"] = bench.rng_state()
    dcp.load(state, checkpoint_id=path)
    set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    job.scheduler.load_state_dict(state["scheduler"])
    job.loader.load_state_dict(state["loader"])
    bench.set_rng_state(state[f"rng_{job.rank}"])
    return state["step"]


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
