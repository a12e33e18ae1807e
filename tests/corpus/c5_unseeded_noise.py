"""Everything is put back, but the net adds noise that no seed governs, as atomic additions do."""

import random

import bench
import torch


class Noisy(bench.Net):
    def forward(self, x):
        h = torch.relu(self.norm(self.inp(x) * self.scale))
        h = h * random.SystemRandom().uniform(0.8, 1.2)
        return self.out(self.drop(self.mid(h)))


def build(args):
    return bench.Job(args, Noisy())


if __name__ == "__main__":
    bench.run(build=build)
