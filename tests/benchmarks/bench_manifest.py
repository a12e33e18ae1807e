"""Measure the hashing of a checkpoint beside `openssl speed`, in one run, and the memory it takes.

Run ``python tests/benchmarks/bench_manifest.py [MiB] [rounds]``. A folder of 8 files (MiB in all,
default 2048) is written to a temporary folder and so lies in the page cache. Each round runs
`openssl speed -elapsed -multi CORES -bytes 16384 sha256`, which hashes one block from memory again
and again, then `manifest.describe` and `manifest.verify` of the folder. The best round of each
counts, once by the clock and once per second of processor time, which a busy machine disturbs less.
Memory is the proportional set size of the process and its helpers at its peak, for the folder and
for one sparse file four times as large. The program fails when a rate per processor second is below
90 % of openssl's, or memory above 256 MiB. The rates by the clock show the same only on a machine
that does nothing else.
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
# Large writes, as of large tensors: the page cache then keeps them in large pieces.
BLOCK_MIB = 64
LEAST = 0.9
MEMORY_LIMIT_MIB = 256
CORES = len(os.sched_getaffinity(0))


def _make(folder: Path, size_mib: int) -> int:
    """Write the files, and return their size in bytes."""
    folder.mkdir()
    block = os.urandom(BLOCK_MIB << 20)
    blocks = max(size_mib // FILES // BLOCK_MIB, 1)
    for number in range(FILES):
        with (folder / f"part-{number}.bin").open("wb") as stream:
            for _ in range(blocks):
                stream.write(block)
    return (blocks * FILES * BLOCK_MIB) << 20


def _processor_s() -> float:
    """Processor time of this process and of all that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _openssl() -> tuple[float, float]:
    """GB/s by the clock, and per second of processor time."""
    command = ["openssl", "speed", "-elapsed", "-seconds", "2", "-bytes", "16384"]
    command += ["-multi", str(CORES), "sha256"]
    began_s, began_processor_s = time.perf_counter(), _processor_s()
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^sha256\s+([\d.]+)k", said, re.MULTILINE)
    if found is None:
        raise SystemExit(f"cannot read what openssl says: {said}")
    gbps = float(found[1]) * 1000 / 1e9
    took_s = time.perf_counter() - began_s
    return gbps, gbps * took_s / (_processor_s() - began_processor_s)


def _measured(run: Callable[[], object], size_bytes: int) -> tuple[float, float]:
    """The same for hashing `size_bytes`."""
    began_s, began_processor_s = time.perf_counter(), _processor_s()
    run()
    took_s, took_processor_s = time.perf_counter() - began_s, _processor_s() - began_processor_s
    return size_bytes / took_s / 1e9, size_bytes / took_processor_s / 1e9


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


def _best(folder: Path, size_bytes: int, rounds: int) -> dict[str, tuple[float, float]]:
    record = manifest.describe(folder)
    rows: dict[str, Callable[[], tuple[float, float]]] = {
        "openssl": _openssl,
        "describe": lambda: _measured(lambda: manifest.describe(folder), size_bytes),
        "verify": lambda: _measured(lambda: manifest.verify(folder, record), size_bytes),
    }
    best = dict.fromkeys(rows, (0.0, 0.0))
    for _ in range(rounds):
        for name, measure in rows.items():
            wall, processor = measure()
            best[name] = max(best[name][0], wall), max(best[name][1], processor)
    return best


def _print_rates(best: dict[str, tuple[float, float]]) -> float:
    """Print the table and return the least share of openssl per processor second."""
    least = 1.0
    print(f"{'GB/s':<10} {'by the clock':>22} {'per processor second':>26}")
    for name, rates in best.items():
        of_openssl = [rate / base for rate, base in zip(rates, best["openssl"], strict=True)]
        least = min(least, of_openssl[1])
        cells = [f"{r:12.2f} ({s:6.1%})" for r, s in zip(rates, of_openssl, strict=True)]
        print(f"{name:<10} {cells[0]:>22} {cells[1]:>26}")
    return least


def _print_memory(folder: Path, sparse: Path) -> float:
    """Print the peaks of both and return the larger, in MiB."""
    peaks = []
    for path in (folder, sparse):
        record = manifest.describe(path)
        peaks.append(_peak_mib(lambda path=path, record=record: manifest.verify(path, record)))
        size = f"{record.size_bytes / 1e9:.1f} GB in {len(record.files)} file(s)"
        print(f"verify, {size:<24} {peaks[-1]:4.0f} MiB of memory at its peak")
    return max(peaks)


def main() -> None:
    size_mib = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as temporary:
        folder, sparse = Path(temporary, "checkpoint"), Path(temporary, "sparse.bin")
        size_bytes = _make(folder, size_mib)
        sparse.touch()
        os.truncate(sparse, 4 * size_bytes)
        print(f"{FILES} files, {size_bytes / 1e9:.2f} GB, {CORES} cores, best of {rounds} rounds")
        share = _print_rates(_best(folder, size_bytes, rounds))
        memory_mib = _print_memory(folder, sparse)
    if share < LEAST or memory_mib > MEMORY_LIMIT_MIB:
        raise SystemExit(f"below {LEAST:.0%} of openssl, or over {MEMORY_LIMIT_MIB} MiB")


if __name__ == "__main__":
    main()
