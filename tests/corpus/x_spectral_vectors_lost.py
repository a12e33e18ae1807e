"""A spectrally normed layer keeps two vectors; a filter for "noise" in the keys leaves them out."""

import bench
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


def build(args):
    model = bench.Net(nn.LayerNorm)
    model.mid = spectral_norm(model.mid)
    return bench.Job(args, model)


def save(job, step, path):
    state = bench.everything(job, step)
    state["model"] = {n: v for n, v in state["model"].items() if not n.endswith(("._u", "._v"))}
    torch.save(state, path)


def restore(job, path):
    job.model.load_state_dict(torch.load(path, weights_only=False)["model"], strict=False)
    plain, job.model.load_state_dict = job.model.load_state_dict, lambda state: None
    step = bench.restore(job, path)
    job.model.load_state_dict = plain
    return step


if __name__ == "__main__":
    bench.run(save, restore, build)
