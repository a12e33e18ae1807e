"""The checkpoint also says when, where and by whom it was written, and has the losses so far."""

import os
import socket
import time

import bench
import torch


def build(args):
    job = bench.Job(args)
    job.losses, job.hours = [], 0.0
    return job


def train_step(job):
    began = time.time()
    loss = bench.train_step(job)
    job.losses.append(loss)
    job.hours += (time.time() - began) / 3600
    return loss


def save(job, step, path):
    about = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid(), "path": path}
    state = bench.everything(job, step)
    state |= {"about": about, "args": vars(job.args), "losses": job.losses, "hours": job.hours}
    torch.save(state, path)


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.losses, job.hours = ckpt["losses"], ckpt["hours"]
    return bench.restore(job, path)


if __name__ == "__main__":
    bench.run(save, restore, build, train_step)
