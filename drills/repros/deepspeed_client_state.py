"""DeepSpeed 0.19.8, ZeRO 0 to 2: of the `client_state` that each rank hands over, one is kept.

Below stage 3 only the first replica writes the file that holds it, and every rank reads that one:
random state, a loader's position, whatever differs from rank to rank. Run with `torchrun
--nproc-per-node 2 deepspeed_client_state.py FOLDER`; for each stage it prints whose state the ranks
were given back.
"""

import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(stage):
    model = nn.Linear(8, 8)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


deepspeed.init_distributed("gloo")
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
for stage in (0, 1, 2, 3):
    engine_of(stage).save_checkpoint(sys.argv[1], tag=f"{stage}", client_state={"of_rank": rank})
    _, state = engine_of(stage).load_checkpoint(sys.argv[1], tag=f"{stage}")
    given = [None] * ranks
    torch.distributed.all_gather_object(given, state["of_rank"])
    if rank == 0:
        print(f"stage {stage}: ranks {list(range(ranks))} were given back the state of {given}")
torch.distributed.destroy_process_group()
