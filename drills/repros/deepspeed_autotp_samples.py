"""DeepSpeed 0.19.8, AutoTP: the engine counts every sample once for each tensor-parallel rank.

`global_samples` is saved and gone on from, so that a restore at another tensor-parallel degree goes
on from a count that is too high by that factor. Run with `torchrun --nproc-per-node 2
deepspeed_autotp_samples.py FOLDER`; it prints the count after three steps of four samples, with the
two ranks as one tensor-parallel replica, and as two data-parallel ones.
"""

import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def engine_of(tp):
    torch.manual_seed(0)
    model = Layers()
    config = {
        "train_micro_batch_size_per_gpu": 4 * tp // 2,  # four samples of a step, whatever the split
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    if tp > 1:
        split = ((r".*up\.weight$", "column"), (r".*down\.weight$", "row"))
        specs = [{"patterns": [name], "partition_type": kind} for name, kind in split]
        layers = {"use_default_specs": False, "layer_specs": specs}
        config["tensor_parallel"] = {"autotp_size": tp, "partition_config": layers}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


deepspeed.init_distributed("gloo")
for tp in (1, 2):
    engine = engine_of(tp)
    for _ in range(3):
        engine.backward(engine(torch.ones(4 * tp // 2, 8)).sum())
        engine.step()
    engine.save_checkpoint(sys.argv[1], tag=f"tp{tp}")
    if torch.distributed.get_rank() == 0:
        print(f"tensor-parallel degree {tp}: 12 samples, global_samples {engine.global_samples}")
torch.distributed.destroy_process_group()
