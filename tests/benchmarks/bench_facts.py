"""What the facts of a model of many tensors weigh.

Run ``python tests/benchmarks/bench_facts.py [layers]``. One and two ranks of a script with 4
parameters a layer (default 2,500 layers: 10,000 tensors, sharded by FSDP2 where there are two
ranks), AdamW and one save run under the observer. Printed for rank 0: the bytes of every kind
of fact, of a plain step and of a step whose state is sampled, how long sampling takes, and how long
ckptdrill reads what the rank left. Beside the bytes stands what the same state weighs leaf by leaf,
`{"name": [dtype, shape, offsets, sizes, digest]}`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ckptdrill.fact_files import read_folder

ROOT = Path(__file__).parents[2]
STEPS, SAMPLED, SAVED_AT = 4, (0, 2, 3), 2

SCRIPT = f"""
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
torch.set_num_threads(1)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("gloo")
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
model = nn.Sequential(*(Layer() for _ in range(int(sys.argv[1]))))
if ranks > 1:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range({STEPS}):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 == {SAVED_AT}:
        saved = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
        torch.save(saved, sys.argv[2] + os.environ.get("RANK", "0"))
"""


def launch(folder: Path, layers: int, ranks: int) -> Path:
    """The fact file of rank 0 of one observed launch, by torchrun where there are several ranks."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(layers), str(folder / "checkpoint")]
    about = {"folder": str(folder), "world_size": ranks, "program": str(script), "args": arguments}
    about |= {"sample_steps": list(SAMPLED), "stop_step": None}
    (folder / "launch.json").write_text(json.dumps(about))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    env |= {"CKPTDRILL_LAUNCH": str(folder / "launch.json")}
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    program = ["-m", "ckptdrill_observer", str(script), *arguments]
    command = [sys.executable, *(start if ranks > 1 else []), *program]
    subprocess.run(command, env=env, capture_output=True, check=True)
    return folder / "rank0.jsonl"


def weights(path: Path) -> dict[str, list[int]]:
    """Bytes of each line of a fact file, by kind and moment."""
    found: dict[str, list[int]] = defaultdict(list)
    for line in path.read_bytes().splitlines():
        fact = json.loads(line)
        at = f" at {fact['at']}" if "at" in fact else ""
        found[fact["fact"] + at].append(len(line) + 1)
    return found


def leaf_by_leaf(path: Path) -> int:
    """Bytes of the largest sampled state, told without columns."""
    states = read_folder(path.parent, "measured", 1).of("state")
    return max(len(json.dumps(f.data, default=dict, separators=(",", ":"))) for f in states)


def shown(folder: Path, layers: int, ranks: int) -> None:
    """Everything about one number of ranks."""
    path = launch(folder, layers, ranks)
    found = weights(path)
    print(f"{4 * layers} parameters, {ranks} ranks; bytes of rank 0: {path.stat().st_size:,}")
    for kind, sizes in sorted(found.items(), key=lambda item: -sum(item[1])):
        if max(sizes) > 2000:
            each = ", ".join(f"{size:,}" for size in sizes)
            print(f"  {kind:<18}{each} bytes")
    print(f"  {'state':<18}{leaf_by_leaf(path):,} bytes leaf by leaf")
    print(f"  plain step        {max(found['batch']) + max(found['stepped']):,} bytes")
    began = time.process_time()
    record = read_folder(path.parent, "measured", 1)
    count = len(record.facts)
    took_s = time.process_time() - began
    print(f"  sampling took at most {max(map(record.took_s, record.of('state'))):.2f} s")
    print(f"  {count} facts read back in {took_s:.2f} s of processor time", flush=True)


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 2500
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(prefix="bench-facts-") as scratch:
            folder = Path(scratch)
            shutil.copytree(ROOT / "ckptdrill" / "observer", folder / "ckptdrill_observer")
            shown(folder, layers, ranks)


if __name__ == "__main__":
    main()
