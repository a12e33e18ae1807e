"""Two micro-batches a step, and a loader that knows where it is."""

import bench


def build(args):
    job = bench.Job(args)
    job.micro_batches = 2
    return job


if __name__ == "__main__":
    bench.run(build=build)
