"""The batch grows with the steps of this process: a resumed run begins small again."""

import bench


def build(args):
    job = bench.Job(args)
    job.calls = 0
    return job


def train_step(job):
    job.calls += 1
    job.loader.batch = 2 if job.calls <= 6 else 4
    return bench.train_step(job)


if __name__ == "__main__":
    bench.run(build=build, train_step=train_step)
