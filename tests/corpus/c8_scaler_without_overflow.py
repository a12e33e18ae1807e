"""A loss scaler that never met an overflow: nothing shows whether it would come back."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    return job


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    loss = torch.nn.functional.cross_entropy(job.net(x), y)
    job.scaler.scale(loss).backward()
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def save(job, step, path):
    torch.save({**bench.everything(job, step), "scaler": job.scaler.state_dict()}, path)


def restore(job, path):
    job.scaler.load_state_dict(torch.load(path, weights_only=False)["scaler"])
    return bench.restore(job, path)


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
