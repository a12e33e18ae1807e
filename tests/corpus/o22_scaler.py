"""The loss scaler is saved, but a new one is made after the load."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    job.calls = 0
    return job


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    loss = torch.nn.functional.cross_entropy(job.net(x), y)
    job.scaler.scale(loss).backward()
    if job.args.resume is None and job.calls < 2:  # half precision overflows at the beginning
        job.model.out.weight.grad.fill_(float("inf"))
    job.calls += 1
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def save(job, step, path):
    torch.save({**bench.everything(job, step), "scaler": job.scaler.state_dict()}, path)


def restore(job, path):
    step = bench.restore(job, path)
    job.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
