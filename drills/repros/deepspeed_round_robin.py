"""DeepSpeed 0.19.8, ZeRO 1 and 2: `round_robin_gradients` deals the parameters of the flat buffer
out in another order, no load looks at it, and the weights of one layer end up in another.

Saved without, loaded with it, on the same two ranks: no error, no warning, another model after the
first step. The same switch makes `_hp_mapping`, and so a universal checkpoint, name the wrong
pieces. Run with `torchrun --nproc-per-node 2 deepspeed_round_robin.py FOLDER`; it prints the
largest distance between the weights that were saved and those after a step with learning rate 0.
"""

import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(round_robin):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "round_robin_gradients": round_robin},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine):
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


deepspeed.init_distributed("gloo")
first = engine_of(round_robin=False)
saved = step(first)
first.save_checkpoint(sys.argv[1], tag="a")
for switch in (False, True):
    other = engine_of(round_robin=switch)
    other.load_checkpoint(sys.argv[1], tag="a")
    loaded = step(other)
    distance = max((loaded[name] - saved[name]).abs().max().item() for name in saved)
    if torch.distributed.get_rank() == 0:
        print(f"round_robin_gradients={switch}: weights moved by {distance:.3g} at learning rate 0")
torch.distributed.destroy_process_group()
