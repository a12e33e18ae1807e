"""What the observer costs a step in which nothing is sampled, on one core, in one run.

Run ``python tests/benchmarks/bench_observer.py [pairs]``. Observed and plain processes of the same
script alternate; each reports the processor time of its own steps, so that other work on the
machine disturbs them less. Shown are the medians over all steps; the target for a step of at least
20 ms is 2 %. Two sizes of step show whether the cost is a fixed one.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
WARM_UP, STEPS = 10, 100
SIZES = (384, 1024)  # width of the model: about 5 and 30 ms a step on the core it was written on

SCRIPT = f"""
import json, sys, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
width = int(sys.argv[1])
model = nn.Sequential(nn.Linear(64, width), *(nn.Linear(width, width) for _ in range(6)),
                      nn.Linear(width, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
data = TensorDataset(torch.randn(32 * {WARM_UP + STEPS + 1}, 64),
                     torch.randint(10, (32 * {WARM_UP + STEPS + 1},)))
times, step, last = [], 0, None
for x, y in DataLoader(data, batch_size=32):
    now = time.thread_time()  # one whole round of the loop, the loader included
    if last is not None:
        times.append(now - last)
    last = now
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
print(json.dumps(times[{WARM_UP}:]))
"""


def _times(script: Path, folder: Path, width: int, observed: bool) -> list[float]:
    """Seconds of processor time of every step of one process."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, str(script), str(width)]
    if observed:
        launch = {"folder": str(folder), "world_size": 1, "program": str(script), "args": []}
        (folder / "launch.json").write_text(json.dumps(launch))
        env |= {"CKPTDRILL_LAUNCH": str(folder / "launch.json")}
        command[1:1] = ["-m", "ckptdrill_observer"]
    output = folder / "rank0.out"
    output.unlink(missing_ok=True)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    text = output.read_text() if observed else done.stdout
    times: list[float] = json.loads(text.splitlines()[-1])
    return times


def _row(script: Path, folder: Path, width: int, pairs: int) -> str:
    plain: list[float] = []
    observed: list[float] = []
    for _ in range(pairs):
        plain += _times(script, folder, width, observed=False)
        observed += _times(script, folder, width, observed=True)
    plain_ms, observed_ms = (1000 * statistics.median(times) for times in (plain, observed))
    extra_ms = observed_ms - plain_ms
    share = 100 * extra_ms / plain_ms
    return f"{width:>6}{plain_ms:>10.2f}{observed_ms:>13.2f}{1000 * extra_ms:>11.0f}{share:>9.2f}"


def main(pairs: int) -> None:
    """Print one row per width."""
    with tempfile.TemporaryDirectory(prefix="bench-observer-") as scratch:
        folder = Path(scratch)
        shutil.copytree(ROOT / "ckptdrill" / "observer", folder / "ckptdrill_observer")
        script = folder / "script.py"
        script.write_text(SCRIPT)
        print(f"{'width':>6}{'plain ms':>10}{'observed ms':>13}{'extra µs':>11}{'extra %':>9}")
        for width in SIZES:
            print(_row(script, folder, width, pairs), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
