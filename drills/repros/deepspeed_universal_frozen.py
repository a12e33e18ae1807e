"""DeepSpeed 0.19.8: a universal load silently brings back no frozen parameter and no buffer.

With `load_universal` the engine skips the module's own state, and what the optimizer steps on is
all that the conversion cuts out of the flat tensors. Frozen weights that were saved, also as
`fp32.pt`, stay as the process initialised them; so do running statistics. Run with `torchrun
--nproc-per-node 1 deepspeed_universal_frozen.py FOLDER`; it prints, for the native and the
universal load, which of the three came back.
"""

import subprocess
import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")


def build(seed: int, universal: bool):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[1].running_mean.normal_()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": universal},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


saved = build(0, universal=False)
saved.backward(saved(torch.ones(4, 8)).sum())
saved.step()
state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
saved.save_checkpoint(sys.argv[1], tag="a", client_state=state)
convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
ends = ["--input_folder", f"{sys.argv[1]}/a", "--output_folder", f"{sys.argv[1]}/a_universal"]
subprocess.run([*convert, *ends], check=True, capture_output=True)
for tag, universal in (("a", False), ("a_universal", True)):
    loaded = build(1, universal)
    loaded.load_checkpoint(sys.argv[1], tag=tag)
    for name in ("0.weight", "1.running_mean", "2.weight"):
        there, here = (engine.module.state_dict()[name] for engine in (saved, loaded))
        print(f"{tag}: {name} {'came back' if torch.equal(there, here) else 'IS ANOTHER'}")
torch.distributed.destroy_process_group()
