"""Two layers of one shape are built in the other order: the optimizer matches them by position."""

import bench
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.inp = nn.Linear(bench.FEATURES, bench.WIDTH)
        for name in order:
            setattr(self, name, nn.Linear(bench.WIDTH, bench.WIDTH))
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(bench.WIDTH, bench.CLASSES)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, bench.WIDTH), persistent=False)

    def forward(self, x):
        h = torch.relu(self.inp(x) * self.scale)
        h = torch.relu(self.b(torch.relu(self.a(h))))
        return self.out(self.drop(h))


def options(parser):
    parser.add_argument("--layers", default="a,b", help="as the model's configuration lists them")


def build(args):
    return bench.Job(args, Net(args.layers.split(",")))


if __name__ == "__main__":
    bench.run(build=build, options=options)
