"""The mean of the weights since step 3 and its count, in plain variables that come back."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.swa = {name: torch.zeros_like(p) for name, p in job.model.named_parameters()}
    job.swa_count = 0
    job.done = 0
    return job


def train_step(job):
    loss = bench.train_step(job)
    job.done += 1
    if job.done > 3:
        job.swa_count += 1
        with torch.no_grad():
            for name, p in job.model.named_parameters():
                job.swa[name] += (p - job.swa[name]) / job.swa_count
    return loss


def save(job, step, path):
    own = {"mean": job.swa, "count": job.swa_count}
    torch.save({**bench.everything(job, step), "swa": own}, path)


def restore(job, path):
    job.done = bench.restore(job, path)
    own = torch.load(path, weights_only=False)["swa"]
    job.swa, job.swa_count = own["mean"], own["count"]
    return job.done


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
