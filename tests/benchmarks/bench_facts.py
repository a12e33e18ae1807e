"""What the facts of a model of many tensors weigh.

Run ``python tests/benchmarks/bench_facts.py [layers]``. One and two ranks of a script with 4
parameters a layer (default 2,500 layers: 10,000 tensors, sharded by FSDP2 where there are two
ranks), AdamW and one DCP save run under the observer. Printed per rank: the bytes of every kind of
fact, of a plain step and of a step whose state is sampled; the time that both add; and how long
ckptdrill reads what one rank left. Beside the bytes stands what the same state weighs leaf by leaf,
`{"name": [dtype, shape, offsets, sizes, digest]}`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from ckptdrill.store import read_facts

ROOT = Path(__file__).parents[2]
STEPS, SAMPLED, SAVED_AT = 8, (0, 4, 5), 4

SCRIPT = f"""
import json, os, sys, time
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
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
times = []
for step in range({STEPS}):
    began = time.perf_counter()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - began)
    if step + 1 == {SAVED_AT}:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({{"model": weights, "optimizer": moments}}, checkpoint_id=sys.argv[2])
print(json.dumps(times))
"""


def launch(folder: Path, layers: int, ranks: int, *, observed: bool) -> list[list[float]]:
    """Seconds of every step, rank by rank, of one launch by torchrun."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(layers), str(folder / f"checkpoint{ranks}{observed}")]
    about = {"folder": str(folder), "world_size": ranks, "program": str(script), "args": arguments}
    about |= {"sample_steps": list(SAMPLED), "stop_step": None}
    (folder / "launch.json").write_text(json.dumps(about))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    env |= {"CKPTDRILL_LAUNCH": str(folder / "launch.json")}
    program = ["-m", "ckptdrill_observer", str(script)] if observed else [str(script)]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    start = torchrun if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *start, *program, *arguments],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    outputs = [(folder / f"rank{n}.out").read_text() for n in range(ranks)] if observed else None
    lines = "".join(outputs or [done.stdout]).splitlines()
    return [json.loads(line) for line in lines if line.startswith("[")]


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
    facts = [fact for fact in read_facts(path, "") if fact.kind == "state"]
    return max(len(json.dumps(dict(f.data), default=dict, separators=(",", ":"))) for f in facts)


def shown(folder: Path, layers: int, ranks: int) -> None:
    """Everything about one number of ranks."""
    plain = launch(folder, layers, ranks, observed=False)
    observed = launch(folder, layers, ranks, observed=True)
    path = folder / "rank0.jsonl"
    found = weights(path)
    print(f"\n{4 * layers} parameters, {ranks} ranks; bytes of rank 0: {path.stat().st_size:,}")
    for kind, sizes in sorted(found.items(), key=lambda item: -sum(item[1])):
        if max(sizes) > 2000:
            print(f"  {kind:<18}{len(sizes):>3} facts, largest {max(sizes):>11,} bytes")
    print(f"  {'state':<18}     leaf by leaf {leaf_by_leaf(path):>11,} bytes")
    step = [max(found[kind]) for kind in ("batch", "stepped")]
    print(f"  a step that is not sampled: {sum(step):,} bytes")
    quiet = [n for n in range(2, STEPS) if not {n, n + 1} & {*SAMPLED, SAVED_AT}]
    times: Any = [[statistics.median([each[0][n] for n in quiet])] for each in (plain, observed)]
    print(f"  such a step takes {times[0][0] * 1e3:.0f} ms plain, {times[1][0] * 1e3:.0f} observed")
    took = [f.data["took_s"] for f in read_facts(path, "") if f.kind == "state"]
    print(f"  sampling the state takes {max(took):.2f} s")
    began = time.process_time()
    list(read_facts(path, ""))
    print(f"  read back in {time.process_time() - began:.2f} s of processor time", flush=True)


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 2500
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(prefix="bench-facts-") as scratch:
            folder = Path(scratch)
            shutil.copytree(ROOT / "ckptdrill" / "observer", folder / "ckptdrill_observer")
            shown(folder, layers, ranks)


if __name__ == "__main__":
    main()
