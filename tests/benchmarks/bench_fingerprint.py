"""Measure the fingerprint beside what it replaces, on one core, in one run.

Run ``python tests/benchmarks/bench_fingerprint.py [MiB]``. Rates are input bytes per second of
processor time of this thread (the best of several runs), so that a busy machine disturbs them less;
extra memory is the growth of the peak resident size, measured in a fresh child per row.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import resource
import sys
import time
from typing import TYPE_CHECKING

import torch
import xxhash

from ckptdrill.observer import fingerprint as fp

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = ["float64", "float32", "bfloat16", "float8_e4m3fn", "int64", "uint8"]
XXH3 = "xxh3_64 of contiguous bytes"


def _raw(tensor: torch.Tensor) -> memoryview:
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()))


def _naive(tensor: torch.Tensor) -> int:
    """Mix every 64-bit word with its index by elementwise operations, a block at a time."""
    words, total = tensor.view(-1).view(torch.int64), 0
    for begin in range(0, words.numel(), 1 << 20):
        block = words[begin : begin + (1 << 20)]
        mixed = block ^ fp._mix_tensor(torch.arange(begin, begin + block.numel()))
        total += int(fp._mix_tensor(mixed).sum().item())
    return total


def _product(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.view(-1).view(torch.int64).view(-1, fp._CELL_WORDS)
    return torch.mv(words, fp._word_table(words.device)[0, 1:])


def _column_entry(tensor: torch.Tensor) -> None:
    rows, columns = tensor.shape
    fp._shard_entry(tensor, (rows, 8 * columns), [[(0, rows)], [(columns, columns)]])


def _odd_column_entry(tensor: torch.Tensor) -> None:
    """Rows that fit no power of two: no two cells have them at the same positions."""
    rows, columns = tensor.shape
    fp._shard_entry(tensor, (rows, 8 * columns + 6), [[(0, rows)], [(columns, columns)]])


def _measured(name: str) -> tuple[Callable[[torch.Tensor], object], str, tuple[int, ...]]:
    """Return what a row of the table runs, the dtype, and the shape without its first dimension."""
    rows: dict[str, tuple[Callable[[torch.Tensor], object], str, tuple[int, ...]]] = {
        XXH3: (lambda t: xxhash.xxh3_64_digest(_raw(t)), "float32", (4096,)),
        "sha256 of contiguous bytes": (lambda t: hashlib.sha256(_raw(t)), "float32", (4096,)),
        "one torch.mv of int64 (it takes two)": (_product, "float32", (4096,)),
        "naive 64-bit mix, eager torch": (_naive, "float32", (4096,)),
        **{f"fingerprint {name}": (fp.entry, name, (4096,)) for name in DTYPES},
        "fingerprint float32, rows of 3": (fp.entry, "float32", (3,)),
        "fingerprint float32, transposed": (lambda t: fp.entry(t.t()), "float32", (4096,)),
        "fingerprint float32, 1 of 8 columns": (_column_entry, "float32", (1024,)),
        "  … of rows of 20,480 bytes": (_column_entry, "float32", (640,)),
        "  … of rows of 8,216 bytes": (_odd_column_entry, "float32", (256,)),
        "  … 64 bytes wide": (_column_entry, "float32", (16,)),
        "fingerprint float32, flat from 1": (
            lambda t: fp.flat_entry(t, (1 << 40,), 1),
            "float32",
            (4096,),
        ),
        "projection float32": (fp.project, "float32", (4096,)),
    }
    return rows[name] if name else (lambda _: list(rows), "", ())


def _best_s(run: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Return the least time of 3 to 20 runs, as many as 2 seconds of processor time allow."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < 20 and sum(times) < 2):
        began = time.thread_time()
        run(tensor)
        times.append(time.thread_time() - began)
    return min(times)


def _measure(name: str, size_bytes: int) -> tuple[float, float]:
    """Return GB/s and MiB of extra peak memory of one row."""
    torch.set_num_threads(1)
    run, dtype_name, tail = _measured(name)
    dtype: torch.dtype = getattr(torch, dtype_name)
    row_bytes = tail[0] * dtype.itemsize
    words = torch.arange(size_bytes // 8)
    tensor = words.view(torch.uint8)[: size_bytes // row_bytes * row_bytes].view(dtype)
    tensor = tensor.view(-1, *tail)
    run(tensor[:64])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = _best_s(run, tensor)
    extra_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return tensor.numel() * tensor.element_size() / seconds / 1e9, extra_kib / 1024


def _small_us() -> float:
    tensor = torch.arange(768.0)
    fp.entry(tensor)
    return _best_s(lambda t: [fp.entry(t) for _ in range(100)], tensor) / 100 * 1e6


def main() -> None:
    size_mib = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    names: list[str] = _measured("")[0](torch.empty(0))  # type: ignore[assignment]
    print(
        f"{'one core, ' + str(size_mib) + ' MiB':38} {'GB/s':>7} {'of xxh3':>8} {'extra MiB':>10}"
    )
    reference = 0.0
    for name in names:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            rate, extra_mib = pool.apply(_measure, (name, size_mib << 20))
        reference = rate if name == XXH3 else reference
        print(f"{name:38} {rate:7.2f} {rate / reference:8.2f} {extra_mib:10.1f}", flush=True)
    torch.set_num_threads(1)
    print(f"entry of a small tensor (768 float32): {_small_us():.0f} us")


if __name__ == "__main__":
    main()
