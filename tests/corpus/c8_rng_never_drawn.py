"""A net without dropout: no generator is drawn from, so none can show that it came back."""

import bench


def build(args):
    return bench.Job(args, bench.Net(dropout=0.0))


if __name__ == "__main__":
    bench.run(build=build)
