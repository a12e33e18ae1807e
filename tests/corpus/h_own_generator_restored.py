"""The net draws its noise from a generator of its own, whose state is saved and put back."""

import bench
import torch


class Noisy(bench.Net):
    def __init__(self):
        super().__init__()
        self.noise = torch.Generator().manual_seed(3)

    def forward(self, x):
        h = torch.relu(self.norm(self.inp(x) * self.scale))
        h = h + 0.3 * torch.randn(h.shape, generator=self.noise)
        return self.out(self.drop(self.mid(h)))


def build(args):
    return bench.Job(args, Noisy())


def save(job, step, path):
    torch.save({**bench.everything(job, step), "noise": job.model.noise.get_state()}, path)


def restore(job, path):
    job.model.noise.set_state(torch.load(path, weights_only=False)["noise"])
    return bench.restore(job, path)


if __name__ == "__main__":
    bench.run(save, restore, build)
