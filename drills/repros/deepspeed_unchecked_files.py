"""DeepSpeed 0.19.8: no load notices an optimizer file with other bytes, of another rank or step.

The files hold no checksum, and nobody compares what they say of their rank or step. Run with
`torchrun --nproc-per-node 2 deepspeed_unchecked_files.py FOLDER`; for each damage, done to a copy
of one save, it prints what the load returned, and how many weights are not those that were saved.
"""

import pathlib
import shutil
import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def weights(engine):
    """What the optimizer of this rank steps on."""
    held = engine.optimizer
    flat = getattr(held, "fp32_partitioned_groups_flat", None)
    return (flat or held.single_partition_of_fp32_groups)[0].detach().flatten().clone()


def damaged(folder, kind, of_rank_0):
    """A copy of the save `b` in which the optimizer file of rank 0 is another one."""
    copy = folder / kind.replace(" ", "-")
    shutil.copytree(folder / "b", copy)
    first, second = sorted(copy.glob("*optim_states.pt"))
    content = bytearray(first.read_bytes())
    place = content.index(of_rank_0)
    if kind == "a flipped bit":
        content[place] ^= 1
    elif kind == "zeros":
        content[place : place + 4096] = bytes(4096)
    elif kind == "that of rank 1":
        content = second.read_bytes()
        second.write_bytes(first.read_bytes())
    elif kind == "that of the step before":
        content = (folder / "a" / first.name).read_bytes()
    first.write_bytes(content)


deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
for stage in (2, 3):
    folder = pathlib.Path(sys.argv[1], f"stage{stage}")
    saved = engine_of(stage)
    for tag in ("a", "b"):
        saved.backward(saved(torch.ones(1, 64)).square().sum())
        saved.step()
        saved.save_checkpoint(folder, tag=tag)
    kinds = ("nothing", "a flipped bit", "zeros", "that of rank 1", "that of the step before")
    for kind in kinds:
        if rank == 0:
            damaged(folder, kind, weights(saved).numpy().tobytes())
        torch.distributed.barrier()
        other = engine_of(stage)
        path, _ = other.load_checkpoint(folder, tag=kind.replace(" ", "-"))
        differ = (weights(other) != weights(saved)).sum()
        torch.distributed.all_reduce(differ)
        if rank == 0:
            told = f"returned {path is not None}, {differ} of 8320 weights differ"
            print(f"stage {stage}, {kind}: {told}")
torch.distributed.destroy_process_group()
