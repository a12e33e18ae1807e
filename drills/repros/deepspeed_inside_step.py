"""DeepSpeed 0.19.8: a checkpoint saved between two micro-batches belongs to no step.

Weights, moments and `global_steps` are those of the step before; buffers are those of the middle of
the step, and the gradients are not saved. Whoever resumes takes the first micro-batch again, which
is right for the weights, and counts it twice in every buffer. Run with `torchrun --nproc-per-node 1
deepspeed_inside_step.py FOLDER`; it prints what the uninterrupted and the resumed run have after
one step of two micro-batches.
"""

import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
BATCHES = [torch.full((4, 8), 1.0) + torch.eye(4, 8) * n for n in (1, 2)]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine, who, save_after=None):
    for number, batch in enumerate(BATCHES):
        engine.backward(engine(batch).square().sum())
        engine.step()
        if number == save_after:
            engine.save_checkpoint(sys.argv[1], tag="inside")
    norm = engine.module[1]
    print(f"{who}: {norm.num_batches_tracked} batches, running mean {norm.running_mean[0]:.6f}")


train(build(), "uninterrupted", save_after=0)
resumed = build()
resumed.load_checkpoint(sys.argv[1], tag="inside")
train(resumed, f"resumed at global step {resumed.global_steps}")
torch.distributed.destroy_process_group()
