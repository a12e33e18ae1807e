"""torch's own loader with workers that stay, and a sampler that knows where it is."""

import bench
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return bench.IDS

    def __getitem__(self, number):
        x, y = bench.samples([number])
        return x[0], y[0]


class Sampler:
    """The numbers of an epoch from `taken` on; a loader asks for them ahead of the training."""

    def __init__(self, base):
        self.base = base
        self.epoch = 0
        self.taken = 0

    def __len__(self):
        return bench.IDS - self.taken

    def __iter__(self):
        self.base.epoch = self.epoch
        return iter(self.base.order()[self.taken :])


def batches(job):
    while True:
        for batch in job.data:
            job.sampler.taken += len(batch[0])
            yield batch
        job.sampler.epoch += 1
        job.sampler.taken = 0


def build(args):
    job = bench.Job(args)
    job.sampler = Sampler(job.loader)
    job.data = DataLoader(
        Samples(),
        batch_size=bench.BATCH,
        sampler=job.sampler,
        num_workers=1,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(bench.SEED),
    )
    job.batches = batches(job)
    return job


def train_step(job):
    x, y = next(job.batches)
    loss = nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def save(job, step, path):
    sampler = {"epoch": job.sampler.epoch, "taken": job.sampler.taken}
    torch.save({**bench.everything(job, step), "sampler": sampler}, path)


def restore(job, path):
    step = bench.restore(job, path)
    sampler = torch.load(path, weights_only=False)["sampler"]
    job.sampler.epoch, job.sampler.taken = sampler["epoch"], sampler["taken"]
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
