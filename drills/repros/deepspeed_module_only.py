"""DeepSpeed 0.19.8, ZeRO 3: `load_module_only=True` restores no weight that is trained.

The module that stage 3 saves holds placeholders of size 0, and loading those raises nothing: the
partitions stay as they were initialised. Buffers and frozen parameters do come back. Run with
`torchrun --nproc-per-node 2 deepspeed_module_only.py FOLDER`; for each stage it prints how much of
the saved weights is there after the load.
"""

import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(stage, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def weights(engine):
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([value.detach().clone().flatten() for value in parameters])


deepspeed.init_distributed("gloo")
for stage in (0, 1, 2, 3):
    first = engine_of(stage, seed=0)
    saved = weights(first)
    first.save_checkpoint(sys.argv[1], tag=f"stage{stage}")
    other = engine_of(stage, seed=1)
    folder, _ = other.load_checkpoint(sys.argv[1], tag=f"stage{stage}", load_module_only=True)
    equal = (weights(other) == saved).float().mean().item()
    if torch.distributed.get_rank() == 0:
        print(f"stage {stage}: load_checkpoint returned {folder is not None}, {equal:.0%} restored")
torch.distributed.destroy_process_group()
