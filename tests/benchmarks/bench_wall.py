"""What drilling costs beside starting the same launches by hand, in one run.

In this order: ckptdrill runs the matrix (default: the quickstart) by torchrun only; then every
launch of that run is started again one after another by
plain torchrun, with the arguments, environment and checkpoints of its launch.json, fresh folders
for what it saves, ``--max-steps`` in place of the observer's end, and no observer; then ckptdrill
runs the matrix with ``--launcher auto``. Targets, as ratios to the plain launches: 1.1 and 0.35.
The job must know ``--out`` and ``--max-steps``, as the reference jobs do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CKPTDRILL = str(Path(sys.executable).with_name("ckptdrill"))
QUICKSTART = Path(__file__).parents[2] / "matrices" / "quickstart.yaml"
OURS = ("CKPTDRILL_LAUNCH", "PYTHONPATH", "TMPDIR")


def _drill(matrix: Path, runs: Path, launcher: str) -> tuple[float, Path]:
    """Wall-clock seconds of one run, and its folder."""
    began = time.perf_counter()
    command = [CKPTDRILL, "run", matrix, "--runs", runs, "--launcher", launcher, "--keep"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        sys.exit(f"ckptdrill ended with exit code {done.returncode}: nothing to compare")
    (latest,) = runs.glob("*/latest")
    return seconds, latest.resolve()


def _plain_command(launch: dict[str, Any], out: Path) -> list[str]:
    # `--out`, its value, or both in one argument.
    args = [word.replace(launch["out"], str(out)) for word in launch["args"]]
    steps = launch["first_step"] + launch["stop_step"]
    return [
        *(launch["python"], "-m", "torch.distributed.run", "--nnodes", "1"),
        *("--nproc-per-node", str(launch["world_size"]), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "localhost:0", launch["program"], *args),
        *("--max-steps", str(steps)),
    ]


def _plain_seconds(launch: dict[str, Any]) -> float:
    """Start one launch as a person would; a restore that is refused may fail."""
    env = {name: value for name, value in launch["env"].items() if name not in OURS}
    with tempfile.TemporaryDirectory() as out:
        command = _plain_command(launch, Path(out))
        began = time.perf_counter()
        subprocess.run(command, cwd=launch["cwd"], env=env, capture_output=True, check=False)
        return time.perf_counter() - began


def main(matrix: Path) -> None:
    """Print one row per launch, then the three totals and their ratios."""
    with tempfile.TemporaryDirectory(prefix="bench-wall-") as scratch:
        cold_s, run = _drill(matrix, Path(scratch) / "cold", "torchrun")
        rows = []
        for path in sorted(run.glob("launches/*/launch.json")):
            launch = json.loads(path.read_bytes())
            ended = json.loads(path.with_name("exit.json").read_bytes())
            rows.append((launch["id"], _plain_seconds(launch), ended["wall_s"]))
        auto_s, _ = _drill(matrix, Path(scratch) / "auto", "auto")
    print(f"{'launch':<48}{'plain s':>9}{'drilled s':>11}")
    for name, plain_s, drilled_s in rows:
        print(f"{name:<48}{plain_s:>9.2f}{drilled_s:>11.2f}")
    total_s = sum(plain_s for _, plain_s, _ in rows)
    print(f"\n{'':<48}{'wall s':>9}{'ratio':>11}")
    print(f"{f'{len(rows)} plain launches, one by one':<48}{total_s:>9.2f}{1:>11.2f}")
    for name, seconds in (("--launcher torchrun", cold_s), ("--launcher auto", auto_s)):
        print(f"{f'ckptdrill run {name}':<48}{seconds:>9.2f}{seconds / total_s:>11.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else QUICKSTART)
