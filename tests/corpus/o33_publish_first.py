"""`latest` moves, and the step before is removed, when an asynchronous save begins, not when it
ends. The writer of step 15 runs out of disk space in its fourth shard, in a thread that nobody
joins.
"""

import os
import shutil
import threading

import bench
import torch

SHARDS = 4


def write(folder, shards, step):
    for number, shard in enumerate(shards):
        if step == 15 and number == SHARDS - 1:
            print("writer: no space left on device")
            return
        torch.save(shard, os.path.join(folder, f"shard-{number}.pt"))
    with open(os.path.join(folder, "complete"), "w"):
        pass


def save(job, step, path):
    root = os.path.join(job.args.out, "checkpoints")
    folder = os.path.join(root, f"step-{step}")
    os.makedirs(folder)
    state = bench.everything(job, step)
    model = [(name, value.clone()) for name, value in state.pop("model").items()]
    shards = [dict(model[i :: SHARDS - 1]) for i in range(SHARDS - 1)] + [state]
    writer = threading.Thread(target=write, args=(folder, shards, step))
    writer.start()
    with open(os.path.join(root, "latest"), "w") as f:
        f.write(f"step-{step}")
    for name in os.listdir(root):
        if name.startswith("step-") and name != f"step-{step}":
            shutil.rmtree(os.path.join(root, name))
    writer.join()


def restore(job, root):
    with open(os.path.join(root, "latest")) as f:
        folder = os.path.join(root, f.read())
    shards = [
        torch.load(os.path.join(folder, f"shard-{n}.pt"), weights_only=False) for n in range(SHARDS)
    ]
    rest = shards.pop()
    job.model.load_state_dict({name: value for shard in shards for name, value in shard.items()})
    job.optimizer.load_state_dict(rest["optimizer"])
    job.scheduler.load_state_dict(rest["scheduler"])
    job.loader.load_state_dict(rest["loader"])
    bench.set_rng_state(rest["rng"][0])
    return rest["step"]


if __name__ == "__main__":
    bench.run(save, restore)
