"""Native ZeRO checkpoints belong to the number of ranks that wrote them.

The net has no buffers and the loop keeps its own cursor and random state, which DeepSpeed does not.
"""

import os

import bench
import deepspeed
import torch
from torch import nn

# It would be compiled for minutes, and gloo does its work as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def options(parser):
    parser.add_argument("--stage", type=int, default=1)


class Engine:
    """DeepSpeed's engine where the loop has a model and an optimizer."""

    def __init__(self, args):
        self.args = args
        deepspeed.init_distributed("gloo")
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        torch.manual_seed(bench.SEED)
        model = bench.Net(nn.LayerNorm)
        optimizer = torch.optim.AdamW(bench.groups(model), betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, bench.warmup_cosine())
        config = {
            "train_micro_batch_size_per_gpu": bench.BATCH // self.world,
            "zero_optimization": {"stage": args.stage},
            "zero_allow_untested_optimizer": True,
        }
        self.net, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
        )
        self.optimizer = optimizer
        self.loader = bench.Loader(self.rank, self.world)
        torch.manual_seed(bench.SEED + self.rank)


def train_step(job):
    x, y = bench.samples(job.loader.next_ids())
    loss = nn.functional.cross_entropy(job.net(x), y)
    job.net.backward(loss)
    job.net.step()
    return loss.item()


def save(job, step, path):
    job.net.save_checkpoint(path, tag="zero", client_state={"step": step})
    own = {"loader": job.loader.state_dict(), "rng": bench.rng_state()}
    torch.save(own, os.path.join(path, f"rank{job.rank}.pt"))


def restore(job, path):
    tag, client_state = job.net.load_checkpoint(path, tag="zero")
    assert tag is not None
    own = torch.load(os.path.join(path, f"rank{job.rank}.pt"), weights_only=False)
    job.loader.load_state_dict(own["loader"])
    bench.set_rng_state(own["rng"])
    return client_state["step"]


if __name__ == "__main__":
    bench.run(save, restore, Engine, train_step, options)
