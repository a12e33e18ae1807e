"""Each rank keeps its loader under its own key: with fewer ranks some keys are never read."""

import bench
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Loader(bench.Loader):
    """The rank's own share of every epoch; `position` counts what this rank has had."""

    def next_ids(self):
        mine = self.order()[self.rank :: self.world]
        rows = max(1, self.batch // self.world)
        if self.position + rows > len(mine):
            self.epoch += 1
            self.position = 0
            mine = self.order()[self.rank :: self.world]
        ids = mine[self.position : self.position + rows]
        self.position += rows
        return ids


def build(args):
    job = bench.Job(args, bench.Net(nn.LayerNorm))
    job.loader = Loader(job.rank, job.world)
    return job


def private_key(job):
    return f"dp_rank_{job.rank}"


def save(job, step, path):
    model, optimizer = get_state_dict(job.net, job.optimizer)
    own = {"loader": job.loader.state_dict(), "rng": bench.rng_state()}
    state = {"model": model, "optimizer": optimizer, private_key(job): own}
    state |= {"scheduler": job.scheduler.state_dict(), "step": step, "world_size": job.world}
    dcp.save(state, checkpoint_id=path)


def restore(job, path):
    model, optimizer = get_state_dict(job.net, job.optimizer)
    own = {"loader": job.loader.state_dict(), "rng": bench.rng_state()}
    state = {"model": model, "optimizer": optimizer, private_key(job): own}
    state |= {"scheduler": job.scheduler.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(job.net, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    job.scheduler.load_state_dict(state["scheduler"])
    job.loader.load_state_dict(own["loader"])
    bench.set_rng_state(own["rng"])
    return state["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
