"""The weights are saved in half the bytes, and trained on as they come back: rounded."""

import bench
import torch


def save(job, step, path):
    state = bench.everything(job, step)
    state["model"] = {
        name: v.to(torch.bfloat16) if v.is_floating_point() else v
        for name, v in state["model"].items()
    }
    torch.save(state, path)


if __name__ == "__main__":
    bench.run(save)
