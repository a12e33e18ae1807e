"""Every rank saves its own loader, all under one key: the checkpoint keeps one of them."""

import bench
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Loader(bench.Loader):
    """The rank's share of every epoch without what a filter drops: ranks get out of step."""

    def next_ids(self):
        ids = []
        while len(ids) < self.batch // self.world:
            mine = self.order()[self.rank :: self.world]
            if self.position == len(mine):
                self.epoch += 1
                self.position = 0
                continue
            sample = mine[self.position]
            self.position += 1
            if self.rank == 0 or sample % 5:
                ids.append(sample)
        return ids


def build(args):
    job = bench.Job(args)
    job.loader = Loader(job.rank, job.world)
    return job


def save(job, step, path):
    model, optimizer = get_state_dict(job.net, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "loader": job.loader.state_dict()}
    state |= {"scheduler": job.scheduler.state_dict(), "step": step}
    state[f"rng_{job.rank}"] = bench.rng_state()
    dcp.save(state, checkpoint_id=path)


def restore(job, path):
    model, optimizer = get_state_dict(job.net, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "loader": job.loader.state_dict()}
    state |= {"scheduler": job.scheduler.state_dict(), "step": 0}
    state[f"rng_{job.rank}"] = bench.rng_state()
    dcp.load(state, checkpoint_id=path)
    set_state_dict(job.net, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    job.scheduler.load_state_dict(state["scheduler"])
    job.loader.load_state_dict(state["loader"])
    bench.set_rng_state(state[f"rng_{job.rank}"])
    return state["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
