"""DeepSpeed 0.19.8: under AutoTP `global_samples` counts a sample once per tensor-parallel rank.

The tensor-parallel ranks see the same samples, and the engine multiplies by all ranks. The number
is saved and restored, so a run that goes on without AutoTP, from a universal checkpoint, believes
that it has seen more data than there was. Run with `torchrun --nproc-per-node 2
deepspeed_autotp_samples.py`; it prints, for 2 data-parallel and for 2 tensor-parallel ranks, how
many samples were trained in three steps and how many the engine counts.
"""

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
BATCH, STEPS = 4, 3
for degree in (1, 2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    if degree > 1:
        specs = [
            {"patterns": [r".*0\.weight$"], "partition_type": "column"},
            {"patterns": [r".*2\.weight$"], "partition_type": "row"},
        ]
        split = {"use_default_specs": False, "layer_specs": specs}
        config["tensor_parallel"] = {"autotp_size": degree, "partition_config": split}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(BATCH, 8)).square().sum())
        engine.step()
    if torch.distributed.get_rank() == 0:
        trained = STEPS * BATCH * 2 // degree
        print(f"{degree} tensor-parallel: {trained} trained, {engine.global_samples} counted")
torch.distributed.destroy_process_group()
