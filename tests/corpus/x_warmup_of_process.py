"""The warm-up counts the steps of this process, so a resumed run warms up again."""

import bench


def build(args):
    job = bench.Job(args)
    job.since_start = 0
    return job


def train_step(job):
    job.since_start += 1
    rates = [group["lr"] for group in job.optimizer.param_groups]
    for group in job.optimizer.param_groups:
        group["lr"] *= min(1.0, job.since_start / 4)
    loss = bench.train_step(job)
    if job.since_start < 4:
        print("warming up from", rates)
    return loss


if __name__ == "__main__":
    bench.run(build=build, train_step=train_step)
