"""DeepSpeed 0.19.8, ZeRO 3: a universal load gives all parameter groups the settings of the first.

Two groups are saved, with another learning rate and weight decay each. The load finds the right
weights and moments, and trains the second group with the first one's. Run with `torchrun
--nproc-per-node 1 deepspeed_universal_groups.py FOLDER`; it prints both groups as they are before
the save, after a native load, and after a universal one.
"""

import subprocess
import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")


def build(universal: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
        "checkpoint": {"load_universal": universal},
    }
    groups = [
        {"params": list(model[0].parameters()), "lr": 1e-3, "weight_decay": 0.1},
        {"params": list(model[1].parameters()), "lr": 2e-3, "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]


def show(when: str, engine) -> None:
    settings = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
    print(f"{when}: (lr, weight decay) of both groups {settings}")


saved = build(universal=False)
saved.backward(saved(torch.ones(4, 8)).sum())
saved.step()
state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
saved.save_checkpoint(sys.argv[1], tag="a", client_state=state)
show("saved", saved)
convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
ends = ["--input_folder", f"{sys.argv[1]}/a", "--output_folder", f"{sys.argv[1]}/a_universal"]
subprocess.run([*convert, *ends], check=True, capture_output=True)
for tag, universal in (("a", False), ("a_universal", True)):
    loaded = build(universal)
    loaded.load_checkpoint(sys.argv[1], tag=tag)
    show(tag, loaded)
torch.distributed.destroy_process_group()
