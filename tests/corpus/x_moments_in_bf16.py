"""The moments are kept in bfloat16 in the checkpoint, and come back rounded."""

import bench
import torch


def save(job, step, path):
    state = bench.everything(job, step)
    for each in state["optimizer"]["state"].values():
        each["exp_avg"] = each["exp_avg"].bfloat16()
        each["exp_avg_sq"] = each["exp_avg_sq"].bfloat16()
    torch.save(state, path)


if __name__ == "__main__":
    bench.run(save)
