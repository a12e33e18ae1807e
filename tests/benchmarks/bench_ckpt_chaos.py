"""Points of interruption and seconds beside those of ckpt-chaos, on its own examples, in one run.

Run ``python tests/benchmarks/bench_ckpt_chaos.py [target] [ranks]``; the targets are `dcp_ddp` and
`loop_ddp`. ckpt-chaos comes from PyPI into a venv of its own, kept under `~/.cache/ckptdrill`,
which sees the torch of this interpreter. It interrupts each rank in real launches, at `--jobs 3` as
by default; ckptdrill drills the same program by `interrupted-save`, its source, repeat and baseline
included in the time. Shown are the points, the wall-clock seconds, and the ratio, whose target is
under 0.5 at as many points or more.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

VERSION = "0.1.8"
CKPTDRILL = str(Path(sys.executable).with_name("ckptdrill"))

# Their own program, started from scratch or from what lies in its folder.
PROGRAM = """\
import glob, importlib, sys
target, out = sys.argv[1:]
phase = "resume" if glob.glob(out + "/checkpoint-*") else "reference"
sys.argv = [target, phase, "--out", out]
importlib.import_module("targets." + target).main()
"""

MATRIX = """\
version: 1
name: chaos
job:
  program: {program}
  args: [{target}, "{{out}}"]
  checkpoint: "{{out}}/checkpoint-{{step}}"
  saves: [5, 10, 15]
  restore_step: 10
  window: 4
  env: {{PYTHONPATH: {folder}}}
topologies:
  ranks: {{dp_replicate: {ranks}}}
policy:
  out_of_scope:
    epoch boundary: each step draws its own samples
    rng: nothing is drawn while it trains
matrix:
  - source: ranks
    drill: interrupted-save
"""


def _chaos() -> Path:
    """The interpreter of a venv that holds ckpt-chaos and sees the packages of this one."""
    venv = Path.home() / ".cache" / "ckptdrill" / f"ckpt-chaos-{VERSION}"
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    if not (packages / "ckpt_chaos").exists():
        wanted = f"ckpt-chaos=={VERSION}"
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wanted], check=True)
    return python


def _theirs(python: Path, target: str, ranks: int, folder: Path) -> tuple[float, Counter[str]]:
    command = [python, "-m", "ckpt_chaos", "bench", target, "--ranks", str(ranks)]
    began = time.perf_counter()
    subprocess.run([*command, "--work", folder], check=False, capture_output=True)
    took_s = time.perf_counter() - began
    results = [json.loads(path.read_bytes()) for path in folder.glob("pt_*/result.json")]
    kinds = ["raised" if each["outcome"]["raised"] else "came back" for each in results]
    return took_s, Counter(kinds[1:])  # the first is the control


def _ours(
    python: Path, target: str, ranks: int, folder: Path
) -> tuple[float, list[dict[str, Any]]]:
    packages = next(python.parents[1].glob("lib/python*/site-packages"))
    program, matrix = folder / "program.py", folder / "chaos.yaml"
    program.write_text(PROGRAM)
    # Beside the program: what lies among the installed packages is not taken for the user's code.
    shutil.copytree(packages / "ckpt_chaos" / "targets", folder / "targets")
    matrix.write_text(MATRIX.format(program=program, target=target, ranks=ranks, folder=folder))
    command = [CKPTDRILL, "run", matrix, "--runs", folder / "runs", "--launcher", "warm"]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--python", sys.executable], check=False, capture_output=True, text=True
    )
    took_s = time.perf_counter() - began
    cells = (folder / "runs" / "chaos" / "latest" / "cells").glob("*interrupted-save*/verdict.json")
    checks = [check for cell in cells for check in json.loads(cell.read_bytes())["checks"]]
    rows = [check for check in checks if check["item"] == "kept generations"]
    if not rows:
        sys.exit(done.stdout + done.stderr)
    points: list[dict[str, Any]] = rows[0]["numbers"]["points"]
    return took_s, points


def main(target: str, ranks: int) -> None:
    """Print both, and the ratio."""
    python = _chaos()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours_s, points = _ours(python, target, ranks, folder)
        theirs_s, theirs = _theirs(python, target, ranks, folder / "theirs")
    one_rank = [point for point in points if point["scope"] == "rank"]
    print(f"{target}, {ranks} ranks, {os.cpu_count()} cores")
    rows = {
        f"ckpt-chaos {VERSION}": (theirs_s, theirs),
        "ckptdrill": (ours_s, Counter(str(point["class"]) for point in points)),
    }
    for name, (seconds, counts) in rows.items():
        print(f"{name:<18}{sum(counts.values()):>5} points {seconds:>8.1f} s  {dict(counts)}")
    print(f"of these {len(one_rank)} with one rank gone; ratio {ours_s / theirs_s:.2f}")


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "dcp_ddp",
        int(sys.argv[2]) if len(sys.argv) > 2 else 2,
    )
