"""torch's own loader: the position comes back, the epoch that the order depends on does not."""

import bench
import torch
from h_torch_loader import build, save, train_step


def restore(job, path):
    step = bench.restore(job, path)
    job.sampler.taken = torch.load(path, weights_only=False)["sampler"]["taken"]
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
