"""The length of the schedule is an argument and not part of the checkpoint: it can change."""

import bench
from torch.optim.lr_scheduler import LambdaLR


def options(parser):
    parser.add_argument("--total-steps", type=int, default=40)


def build(args):
    job = bench.Job(args)
    job.scheduler = LambdaLR(job.optimizer, bench.warmup_cosine(total=args.total_steps))
    return job


if __name__ == "__main__":
    bench.run(build=build, options=options)
