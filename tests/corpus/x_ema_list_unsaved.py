"""The average of the weights is a list, made at the first step that finds none, and never saved."""

import bench
import torch

AVERAGE = []


def train_step(job):
    loss = bench.train_step(job)
    weights = [p.detach() for p in job.model.parameters()]
    if not AVERAGE:
        AVERAGE.extend(w.clone() for w in weights)
    torch._foreach_lerp_(AVERAGE, weights, 0.05)
    return loss


if __name__ == "__main__":
    bench.run(train_step=train_step)
