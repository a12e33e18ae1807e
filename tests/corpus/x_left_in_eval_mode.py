"""The restored model is validated once, and stays in evaluation mode."""

import bench
import torch


def restore(job, path):
    ckpt = torch.load(path, weights_only=False)
    job.model.load_state_dict(ckpt["model"])
    job.model.eval()
    with torch.no_grad():
        x, y = bench.samples(range(8))
        print("restored:", torch.nn.functional.cross_entropy(job.model(x), y).item())
    job.optimizer.load_state_dict(ckpt["optimizer"])
    job.scheduler.load_state_dict(ckpt["scheduler"])
    job.loader.load_state_dict(ckpt["loader"])
    bench.set_rng_state(ckpt["rng"][job.rank])
    return ckpt["step"]


if __name__ == "__main__":
    bench.run(restore=restore)
