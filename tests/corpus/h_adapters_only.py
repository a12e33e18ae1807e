"""Only the adapters are saved; the frozen net comes from where it always comes from."""

import bench
import torch
from x_adapter_rewrapped import Adapter


def build(args):
    torch.manual_seed(3)  # the pretrained net
    model = bench.Net(torch.nn.LayerNorm).requires_grad_(False)
    torch.manual_seed(4)
    model.mid = Adapter(model.mid)
    job = bench.Job(args, model)
    bench.seed_everything(args, job.rank)
    return job


def save(job, step, path):
    state = bench.everything(job, step)
    trained = {name for name, p in job.model.named_parameters() if p.requires_grad}
    state["model"] = {name: v for name, v in state["model"].items() if name in trained}
    torch.save(state, path)


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    fit = job.model.load_state_dict(ckpt["model"], strict=False)
    assert not fit.unexpected_keys
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][0])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(save, restore, build)
