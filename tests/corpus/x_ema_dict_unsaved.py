"""The average of the weights is kept in a dict and is in no checkpoint: a resume begins anew."""

import bench
import torch


class Ema:
    def __init__(self, model, decay=0.98):
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * p.detach()


def build(args):
    job = bench.Job(args)
    job.ema = Ema(job.model)
    return job


def train_step(job):
    loss = bench.train_step(job)
    job.ema.update(job.model)
    return loss


if __name__ == "__main__":
    bench.run(build=build, train_step=train_step)
