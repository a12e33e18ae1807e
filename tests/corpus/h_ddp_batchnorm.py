"""DDP sends rank 0's running statistics to all ranks before each forward: those that other ranks
hold at a save mean nothing.
"""

import bench
from torch import nn


def build(args):
    return bench.Job(args, bench.Net(nn.BatchNorm1d))


if __name__ == "__main__":
    bench.run(build=build)
