"""The folder with the highest number is taken, and files that are not in it are left out quietly.
The save of step 15 was cut short after the weights.
"""

import os

import bench
import torch


def save(job, step, path):
    folder = os.path.join(job.args.out, "checkpoints", f"step-{step}")
    os.makedirs(folder)
    state = bench.everything(job, step)
    torch.save(state.pop("model"), os.path.join(folder, "model.pt"))
    if step == 15:
        print("save: input/output error")
        return
    torch.save(state, os.path.join(folder, "trainer_state.pt"))


def restore(job, root):
    newest = max(os.listdir(root), key=lambda name: int(name.removeprefix("step-")))
    folder = os.path.join(root, newest)
    job.model.load_state_dict(torch.load(os.path.join(folder, "model.pt")))
    if not os.path.exists(os.path.join(folder, "trainer_state.pt")):
        return int(newest.removeprefix("step-"))
    state = torch.load(os.path.join(folder, "trainer_state.pt"), weights_only=False)
    job.optimizer.load_state_dict(state["optimizer"])
    job.scheduler.load_state_dict(state["scheduler"])
    job.loader.load_state_dict(state["loader"])
    bench.set_rng_state(state["rng"][0])
    return state["step"]


if __name__ == "__main__":
    bench.run(save, restore)
