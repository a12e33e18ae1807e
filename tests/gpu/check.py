"""The checks that need a GPU, as one short program: `python tests/gpu/check.py` on a node that has
one.

In order: the digest of a tensor is the same on the device as on the CPU, for every dtype and for
slices; row hashes and projections agree; the reference job is drilled on as many GPUs as there are
(up to 4), and its facts say that they ran on CUDA, by nccl where there is more than one rank.
Prints one line per check and exits 1 at the first that fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ckptdrill.observer import fingerprint

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)

MATRIX = """\
version: 1
name: gpu
job:
  program: "{{jobs}}/torch_dcp.py"
  args: [--out, "{{out}}", --save-at, "8,12"]
  resume_args: [--resume, "{{resume}}"]
  checkpoint: "{{out}}/step-{{step}}"
  saves: [8, 12]
  restore_step: 8
  window: 5
topologies:
  some: {{dp_shard: {ranks}}}
  one: {{dp_shard: 1}}
policy:
  rng: {{same_world_size: continued, other_world_size: not_guaranteed}}
matrix:
  - {{source: some, targets: {targets}}}
"""


def digests_agree() -> None:
    """CPU and device see the same logical tensor."""
    generator = torch.Generator().manual_seed(7)
    for dtype in DTYPES:
        raw = torch.randint(0, 2, (257, 36 * 8), generator=generator, dtype=torch.uint8)
        host = raw.bool() if dtype is torch.bool else raw.view(torch.uint8).contiguous().view(dtype)
        for part in (host, host[:, 1:5], host[3:, :], host[0]):
            here, there = fingerprint.entry(part), fingerprint.entry(part.cuda())
            assert here == there, (dtype, here, there)
    floats = torch.rand(512, 300, generator=generator)
    assert fingerprint.row_hashes(floats) == fingerprint.row_hashes(floats.cuda())
    here, there = fingerprint.project(floats), fingerprint.project(floats.cuda())
    assert all(abs(a - b) <= 1e-9 * max(1.0, abs(a)) for a, b in zip(here, there, strict=True))
    print("digests, row hashes and projections agree on CPU and", torch.cuda.get_device_name())


def speed() -> None:
    """GB/s of the digest on the device."""
    tensor = torch.rand(1 << 28, device="cuda")
    fingerprint.entry(tensor)
    torch.cuda.synchronize()
    began = time.perf_counter()
    fingerprint.entry(tensor)
    print(f"digest of 1 GiB on the device: {1.0737 / (time.perf_counter() - began):.0f} GB/s")


def drilled(folder: Path) -> None:
    """The reference job on the GPUs of this node."""
    ranks = min(4, torch.cuda.device_count())
    targets = "[some, one]" if ranks > 1 else "[some]"
    (folder / "gpu.yaml").write_text(MATRIX.format(ranks=ranks, targets=targets))
    command = [sys.executable, "-m", "ckptdrill", "run", str(folder / "gpu.yaml")]
    done = subprocess.run([*command, "--runs", str(folder / "runs")], check=False)
    run = folder / "runs/gpu/latest"
    facts = [
        json.loads(line)
        for path in run.glob("launches/source.some/rank*.jsonl")
        for line in path.read_text().splitlines()
    ]
    started = [fact for fact in facts if fact["fact"] == "started"]
    assert started, "no rank recorded how it started"
    assert all(fact["cuda"] and fact["device_count"] for fact in started), started
    backends = {fact["backend"] for fact in facts if fact["fact"] == "process_group"}
    assert ranks == 1 or backends == {"nccl"}, backends
    print(f"drilled on {ranks} GPUs, backends {backends or 'none'}, exit code {done.returncode}")
    assert done.returncode == 0


if __name__ == "__main__":
    digests_agree()
    speed()
    with tempfile.TemporaryDirectory() as scratch:
        drilled(Path(scratch))
