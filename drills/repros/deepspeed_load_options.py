"""DeepSpeed 0.19.8: what each option of `load_checkpoint` leaves behind, and that none says so.

Every load below returns the path and the client state as a whole one does. Run with `torchrun
--nproc-per-node 2 deepspeed_load_options.py FOLDER`; for each option it prints whether the moments,
their step and the schedule of a fresh engine are then those that were saved.
"""

import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    return model[0]


def step(engine):
    engine.backward(engine(torch.ones(1, 8)).square().sum())
    engine.step()


def moments(engine):
    states = engine.optimizer.optimizer.state.values()
    return [value for state in states for value in (state["exp_avg"], state["step"])]


deepspeed.init_distributed("gloo")
saved = engine_of(0)
for _ in range(3):
    step(saved)
saved.save_checkpoint(sys.argv[1], tag="a")
step(saved)
names = ("load_module_only", "load_optimizer_states", "load_lr_scheduler_states")
for options in ({}, {names[0]: True}, {names[1]: False}, {names[2]: False}):
    loaded = engine_of(1)
    path, _ = loaded.load_checkpoint(sys.argv[1], tag="a", **options)
    rate = loaded.lr_scheduler.last_epoch
    step(loaded)
    same = all(map(torch.allclose, moments(saved), moments(loaded)))
    if torch.distributed.get_rank() == 0:
        told = f"returned {path is not None}; moments go on: {same}; schedule at step {rate} of 3"
        print(f"{options or 'all'}: {told}")
torch.distributed.destroy_process_group()
