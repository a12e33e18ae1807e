"""DeepSpeed 0.19.8: what `zero_to_fp32` exports is the weights alone; training from it is another.

Every weight of the export is the saved one, and nothing else is there: the optimizer begins afresh,
its first updates are of full size, and whatever follows is another run. Run with `torchrun
--nproc-per-node 1 deepspeed_export.py FOLDER`; it prints the loss over three further steps, of the
run itself, of a restore of its checkpoint, and of a restart from the export.
"""

import sys

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")


def build(weights=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    if weights is not None:
        model.load_state_dict(weights)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def losses(engine):
    for _ in range(3):
        loss = engine(torch.eye(4, 8)).square().sum()
        engine.backward(loss)
        engine.step()
        yield f"{loss.item():.6f}"


run = build()
list(losses(run))
run.save_checkpoint(sys.argv[1], tag="a")
restored = build()
restored.load_checkpoint(sys.argv[1], tag="a")
exported = build(get_fp32_state_dict_from_zero_checkpoint(sys.argv[1], tag="a"))
for name, engine in {"itself": run, "restored": restored, "from the export": exported}.items():
    print(f"{name}: {' '.join(losses(engine))}", flush=True)
torch.distributed.destroy_process_group()
