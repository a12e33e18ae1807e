"""The random state is put back, and then a set-up function seeds again."""

import bench
import torch


def set_up_logging():
    torch.manual_seed(1234)  # so that the sampled log lines are always the same


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][job.rank])
    set_up_logging()
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
