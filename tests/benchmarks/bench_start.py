"""How long ckptdrill takes to answer, beside an interpreter that does nothing, in one run.

Run ``python tests/benchmarks/bench_start.py [repeats]``. The commands alternate; shown are the best
and the median of the wall-clock seconds of each, and the ratio of the best to that of the empty
interpreter. The target for ``--help`` is under 0.3 s on an idle machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

PYTHON = sys.executable
CKPTDRILL = str(Path(PYTHON).with_name("ckptdrill"))
MATRIX = str(Path(__file__).parents[2] / "matrices" / "quickstart.yaml")

COMMANDS = {
    "python -c pass": [PYTHON, "-c", "pass"],
    "ckptdrill --help": [CKPTDRILL, "--help"],
    "ckptdrill --version": [CKPTDRILL, "--version"],
    "ckptdrill list": [CKPTDRILL, "list"],
    "ckptdrill plan quickstart": [CKPTDRILL, "plan", MATRIX],
    "python -c 'import torch'": [PYTHON, "-c", "import torch"],
}


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main(repeats: int) -> None:
    """Print one row per command."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            times[name].append(_seconds(command))
    empty = min(times["python -c pass"])
    print(f"{'command':<28}{'best s':>9}{'median s':>10}{'ratio':>8}")
    for name, values in times.items():
        best = min(values)
        print(f"{name:<28}{best:>9.3f}{statistics.median(values):>10.3f}{best / empty:>8.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
