"""Everything is put back, but the net adds noise from a generator that was never seeded."""

import bench
import torch


class Noisy(bench.Net):
    def __init__(self):
        super().__init__()
        self.noise = torch.Generator()
        self.noise.seed()

    def forward(self, x):
        h = torch.relu(self.norm(self.inp(x) * self.scale))
        h = h + 0.3 * torch.randn(h.shape, generator=self.noise)
        return self.out(self.drop(self.mid(h)))


def build(args):
    return bench.Job(args, Noisy())


if __name__ == "__main__":
    bench.run(build=build)
