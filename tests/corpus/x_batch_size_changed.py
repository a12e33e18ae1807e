"""The batch size is an argument, and the resumed run has another one."""

import bench


def options(parser):
    parser.add_argument("--batch-size", type=int, default=bench.BATCH)


def build(args):
    return bench.Job(args, batch=args.batch_size)


if __name__ == "__main__":
    bench.run(build=build, options=options)
