"""The weights are trained in bfloat16 with float32 masters; the resumed masters are made from the
rounded weights.
"""

import bench
import torch


def build(args):
    job = bench.Job(args, bench.Net().bfloat16())
    job.masters = [p.detach().float().requires_grad_() for p in job.model.parameters()]
    job.optimizer = torch.optim.AdamW(job.masters, lr=1e-2, betas=(0.9, 0.95))
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, bench.warmup_cosine())
    return job


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    loss = torch.nn.functional.cross_entropy(job.net(x.bfloat16()).float(), y)
    loss.backward()
    for p, master in zip(job.model.parameters(), job.masters, strict=True):
        master.grad, p.grad = p.grad.float(), None
    job.optimizer.step()
    with torch.no_grad():
        for p, master in zip(job.model.parameters(), job.masters, strict=True):
            p.copy_(master)
    job.scheduler.step()
    return loss.item()


def save(job, step, path):
    torch.save({**bench.everything(job, step), "masters": job.masters}, path)


def restore(job, path):
    step = bench.restore(job, path)
    with torch.no_grad():
        for p, master in zip(job.model.parameters(), job.masters, strict=True):
            master.copy_(p)
    return step


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
