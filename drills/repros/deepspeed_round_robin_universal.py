"""DeepSpeed 0.19.8, ZeRO 1 and 2: with `round_robin_gradients` a universal checkpoint holds other
weights under a parameter's name.

The flat buffer is in another order than the group, and the fragments of the parameters, which the
conversion cuts it by, are those of the group's order. No step of it raises anything. Run with
`torchrun --nproc-per-node 2 deepspeed_round_robin_universal.py FOLDER`; it prints, with the switch
off and on, how many parameters of the converted checkpoint are those that were saved.
"""

import subprocess
import sys

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
for switch in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "round_robin_gradients": switch},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    folder = f"{sys.argv[1]}/{switch}"
    universal = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(folder, tag="a", client_state=universal)
    if rank == 0:
        module = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        ends = ["--input_folder", f"{folder}/a", "--output_folder", f"{folder}/a_universal"]
        done = subprocess.run([*module, *ends], check=True, capture_output=True)
        equal = 0
        for name, value in model.named_parameters():
            path = f"{folder}/a_universal/zero/{name}/fp32.pt"
            saved = torch.load(path, weights_only=False)["param"]
            equal += torch.equal(saved.reshape(value.shape), value.detach())
        print(f"round_robin_gradients={switch}: {equal} of 6 parameters, exit {done.returncode}")
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
