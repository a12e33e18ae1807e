"""DeepSpeed 0.19.8: where `latest` is gone, `load_checkpoint` returns `(None, None)` and no error.

The checkpoint itself is whole. A job that does not look at what it was returned begins again at
step 0, and its next save lets a new `latest` name that. Run with `torchrun --nproc-per-node 1
deepspeed_latest_gone.py FOLDER`; it prints what a load returns with the pointer and without it.
"""

import pathlib
import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(seed):
    torch.manual_seed(seed)
    model = nn.Linear(8, 8)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


deepspeed.init_distributed("gloo")
saved = engine_of(0)
saved.save_checkpoint(sys.argv[1], tag="a")
for there in (True, False):
    if not there:
        pathlib.Path(sys.argv[1], "latest").unlink()
    loaded = engine_of(1)
    returned = loaded.load_checkpoint(sys.argv[1])
    equal = torch.equal(saved.module.weight, loaded.module.weight)
    print(f"latest there: {there}; load_checkpoint returned {returned[0]}; restored: {equal}")
torch.distributed.destroy_process_group()
