"""The dropout is an argument, and the resumed run has another one: no state tells."""

import bench


def options(parser):
    parser.add_argument("--dropout", type=float, default=0.1)


def build(args):
    return bench.Job(args, bench.Net(dropout=args.dropout))


if __name__ == "__main__":
    bench.run(build=build, options=options)
