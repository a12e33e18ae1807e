"""Run a training script as its owner would: with plain torchrun, no observer, to its own end.

Under the observer a rank leaves as soon as its last fact is on disk. Left alone, Python tears gloo
down, and there torch 2.13 can abort or hang after all work is done (a gloo thread frees a tensor
while the interpreter goes away). These two endings say nothing about the script and are tried
again; every other failure is the test's.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 120
ATTEMPTS = 3
_ABORTED_AT_EXIT = "terminate called without an active exception"


def output_of(script: Path, *arguments: str, ranks: int = 1) -> str:
    """What the script printed.

    Raises AssertionError with the standard error when it fails.
    """
    for _ in range(ATTEMPTS):
        returncode, stdout, stderr = _run(script, arguments, ranks)
        if returncode is not None and _ABORTED_AT_EXIT not in stderr:
            break
    assert returncode == 0, stderr or f"no end within {TIMEOUT_S} s"
    return stdout


def _run(script: Path, arguments: tuple[str, ...], ranks: int) -> tuple[int | None, str, str]:
    """Exit code (None: it hung), standard output, standard error."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(script), *arguments]
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers when it is asked, not when it is killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        return None, "", ""
    return process.returncode, stdout, stderr
