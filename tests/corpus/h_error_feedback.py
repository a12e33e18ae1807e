"""Gradients are sent in few bits; what was rounded off is added to the next, and comes back."""

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.residuals = [torch.zeros_like(p) for p in job.model.parameters()]
    return job


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    loss = torch.nn.functional.cross_entropy(job.net(x), y)
    loss.backward()
    with torch.no_grad():
        for p, residual in zip(job.model.parameters(), job.residuals, strict=True):
            wanted = p.grad + residual
            sent = wanted.sign() * wanted.abs().mean()
            residual.copy_(wanted - sent)
            p.grad.copy_(sent)
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def save(job, step, path):
    torch.save({**bench.everything(job, step), "residuals": job.residuals}, path)


def restore(job, path):
    step = bench.restore(job, path)
    job.residuals = torch.load(path, weights_only=False)["residuals"]
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
