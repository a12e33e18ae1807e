"""Measure the hashing of a checkpoint beside `openssl speed`, in one run, and the memory it takes.

Run ``python tests/benchmarks/bench_manifest.py [MiB] [rounds]``. A folder of 8 files (MiB in all,
default 2048) is written to a temporary folder and so lies in the page cache. Each round runs
`openssl speed -elapsed -multi CORES -bytes 16384 sha256`, which hashes one block from memory again
and again, then `manifest.describe` and `manifest.verify` of the folder. The best round of each
counts, so that a busy machine disturbs less. Memory is the proportional set size of the process and
its helpers at its peak, for the folder and for one sparse file four times as large. The program
fails below 90 % of openssl, or above 256 MiB.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ckptdrill import manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILES = 8
LEAST = 0.9
MEMORY_LIMIT_MIB = 256
CORES = len(os.sched_getaffinity(0))


def _make(folder: Path, size_mib: int) -> int:
    """Write the files, and return their size in bytes."""
    folder.mkdir()
    block = os.urandom(1 << 20)
    for number in range(FILES):
        with (folder / f"part-{number}.bin").open("wb") as stream:
            for _ in range(size_mib // FILES):
                stream.write(block)
    return size_mib // FILES * FILES << 20


def _openssl_gbps() -> float:
    command = ["openssl", "speed", "-elapsed", "-seconds", "2", "-bytes", "16384"]
    command += ["-multi", str(CORES), "sha256"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^sha256\s+([\d.]+)k", said, re.MULTILINE)
    if found is None:
        raise SystemExit(f"cannot read what openssl says: {said}")
    return float(found[1]) * 1000 / 1e9


def _gbps(run: Callable[[], object], size_bytes: int) -> float:
    began = time.perf_counter()
    run()
    return size_bytes / (time.perf_counter() - began) / 1e9


def _family(process: int) -> Iterator[int]:
    """The process and all that it started."""
    yield process
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _pss_mib() -> float:
    total = 0
    for process in _family(os.getpid()):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        total += int(found[1]) if found else 0
    return total / 1024


def _peak_mib(run: Callable[[], object]) -> float:
    peak, ended = _pss_mib(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, _pss_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        ended.set()
        watcher.join()
    return peak


def _best(folder: Path, size_bytes: int, rounds: int) -> dict[str, float]:
    record = manifest.describe(folder)
    rows: dict[str, Callable[[], float]] = {
        "openssl": _openssl_gbps,
        "describe": lambda: _gbps(lambda: manifest.describe(folder), size_bytes),
        "verify": lambda: _gbps(lambda: manifest.verify(folder, record), size_bytes),
    }
    best = dict.fromkeys(rows, 0.0)
    for _ in range(rounds):
        for name, measure in rows.items():
            best[name] = max(best[name], measure())
    return best


def main() -> None:
    size_mib = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as temporary:
        folder, sparse = Path(temporary, "checkpoint"), Path(temporary, "sparse.bin")
        size_bytes = _make(folder, size_mib)
        sparse.touch()
        os.truncate(sparse, 4 * size_bytes)
        best = _best(folder, size_bytes, rounds)
        print(f"{FILES} files, {size_bytes / 1e9:.2f} GB, {CORES} cores, best of {rounds}")
        for name, gbps in best.items():
            print(f"{name:<10} {gbps:6.2f} GB/s   {gbps / best['openssl']:5.2f} of openssl")
        record, of_sparse = manifest.describe(folder), manifest.describe(sparse)
        peaks = {
            f"verify, {size_bytes / 1e9:.1f} GB in {FILES} files": lambda: manifest.verify(
                folder, record
            ),
            f"verify, {4 * size_bytes / 1e9:.1f} GB in one file": lambda: manifest.verify(
                sparse, of_sparse
            ),
        }
        memory = {name: _peak_mib(run) for name, run in peaks.items()}
        for name, mib in memory.items():
            print(f"{name:<30} {mib:6.0f} MiB at its peak")
    if min(best.values()) < LEAST * best["openssl"] or max(memory.values()) > MEMORY_LIMIT_MIB:
        raise SystemExit(f"below {LEAST:.0%} of openssl, or over {MEMORY_LIMIT_MIB} MiB")


if __name__ == "__main__":
    main()
