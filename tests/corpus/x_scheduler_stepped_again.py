"""After the restore the scheduler is stepped once more, to set the learning rate."""

import bench
import torch


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.scheduler.step()
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][job.rank])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
