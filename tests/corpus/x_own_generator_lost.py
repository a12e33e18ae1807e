"""The net draws its noise from a generator of its own, whose state is not saved."""

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


if __name__ == "__main__":
    bench.run(build=build)
