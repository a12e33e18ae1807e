"""Two DCP checkpoints are kept, and the older one is read when the newest cannot be."""

import os
import shutil

import bench
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(job, step, path):
    root = os.path.join(job.args.out, "checkpoints")
    newest, previous = os.path.join(root, "newest"), os.path.join(root, "previous")
    if os.path.exists(newest):
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(newest, previous)
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": job.scheduler.state_dict()}
    state |= {"loader": job.loader.state_dict(), "step": step, "rng": bench.rng_state()}
    dcp.save(state, checkpoint_id=newest)


def load(job, path):
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": job.scheduler.state_dict()}
    state |= {"loader": job.loader.state_dict(), "step": 0, "rng": bench.rng_state()}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    job.scheduler.load_state_dict(state["scheduler"])
    job.loader.load_state_dict(state["loader"])
    bench.set_rng_state(state["rng"])
    return state["step"]


def restore(job, root):
    try:
        return load(job, os.path.join(root, "newest"))
    except dcp.api.CheckpointException as error:
        print(f"newest checkpoint not usable: {error}")
        return load(job, os.path.join(root, "previous"))


if __name__ == "__main__":
    bench.run(save, restore)
