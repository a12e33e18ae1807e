"""DeepSpeed 0.19.8, ZeRO 3: without optimizer states the weights are those of `latest`, whatever
tag is asked for.

`load_checkpoint(folder, tag="old", load_optimizer_states=False)` reads the module through
`get_fp32_state_dict_from_zero_checkpoint(folder)`, which is not told the tag; schedule and counters
are those of the tag. Run with `torchrun --nproc-per-node 2 deepspeed_other_tag.py FOLDER`; it
prints the value that was saved under each tag, and what came back for "old".
"""

import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(stage, value):
    model = nn.Linear(8, 8)
    nn.init.constant_(model.weight, value)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def weight(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return engine.module.weight.detach().mean().item()


deepspeed.init_distributed("gloo")
for stage in (2, 3):
    folder = f"{sys.argv[1]}/stage{stage}"
    for tag, value in (("old", 1.0), ("new", 2.0)):
        engine_of(stage, value).save_checkpoint(folder, tag=tag)
    other = engine_of(stage, 0.0)
    path, _ = other.load_checkpoint(folder, tag="old", load_optimizer_states=False)
    found = weight(other)
    if torch.distributed.get_rank() == 0:
        print(f"stage {stage}: old is 1, new is 2; loading old returned {path} with {found:g}")
torch.distributed.destroy_process_group()
