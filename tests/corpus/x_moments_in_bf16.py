"""The moments are kept in bfloat16 in the checkpoint, and come back rounded."""

import bench
import torch


def save(job, step, path):
    state = bench.everything(job, step)
    small = {
        index: {key: v.bfloat16() if v.ndim else v for key, v in each.items()}
        for index, each in state["optimizer"]["state"].items()
    }
    state["optimizer"] = {**state["optimizer"], "state": small}
    torch.save(state, path)


if __name__ == "__main__":
    bench.run(save)
