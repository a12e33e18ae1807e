"""The stranger's script writes its checkpoints through a package of its house, of which there are
two versions: the newer reads both formats, the older refuses the newer one by name.

ckptdrill builds both environments from wheels over the interpreter of the tests. The twin is a
third name for the old environment: nothing is skewed there, and nothing may pass.
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

PACKING = """\
import torch

__version__ = "{version}"


def save(state, path):
    torch.save({{**state, "packing": {writes}}}, path)


def load(path):
    state = torch.load(path, map_location="cpu", weights_only=False)
    if state["packing"] > {writes}:
        raise ValueError(f"packing {version} cannot read format {{state['packing']}}")
    return state
"""
MATRIX = """
job:
  program: train.py
  args: [--out, "{out}", --save-every, "4", --no-augment]
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/ckpt-{step}.pt"
  saves: [8]
  window: 5
  timeout_s: 120
environments:
  old: {python: PYTHON, requirements: [./packing-1.0-py3-none-any.whl], no_deps: true}
  new: {python: PYTHON, requirements: [./packing-2.0-py3-none-any.whl], no_deps: true}
  same: {python: PYTHON, requirements: [./packing-1.0-py3-none-any.whl], no_deps: true}
topologies:
  one: {dp: 1}
policy:
  out_of_scope: {rng: without augmentation the script draws no random number while it trains}
repeats: 0
matrix:
  - {source: one@old, targets: [one@new, one@same]}
  - {source: one@new, target: one@old}
"""


def wheel(folder: Path, version: str, writes: int) -> None:
    """A pure wheel of one module, as a build would leave it."""
    info = f"packing-{version}.dist-info"
    files = {
        "packing.py": PACKING.format(version=version, writes=writes),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: packing\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},sha256={_digest(text)},{len(text)}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,\n"])
    with zipfile.ZipFile(folder / f"packing-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def test_both_directions_and_a_pair_that_differs_in_nothing(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bench.folder
    script = (Path(__file__).parent / "user_script" / "train.py").read_text()
    script = script.replace("torch.save(", "packing.save(").replace(
        "import torch\n", "import packing\nimport torch\n", 1
    )
    plain = 'torch.load(args.resume, map_location="cpu", weights_only=False)'
    (folder / "train.py").write_text(script.replace(plain, "packing.load(args.resume)"))
    wheel(folder, "1.0", 1)
    wheel(folder, "2.0", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    result = bench.drill(bench.matrix("skew", MATRIX.replace("PYTHON", sys.executable)))
    verdicts = result.verdicts
    upgrade = verdicts["one-old_to_one-new.version-skew"]
    assert (upgrade["word"], upgrade["reason"]) == ("Pass", "held"), result.out
    assert "written by packing 1.0, read by packing 2.0" in upgrade["explanation"]
    back = verdicts["one-new_to_one-old.version-skew"]
    assert (back["word"], back["reason"]) == ("Unsupported", "refused")
    assert "in load: ValueError: packing 1.0 cannot read format 2" in back["explanation"]
    assert "written by packing 2.0, read by packing 1.0" in back["explanation"]
    same = verdicts["one-old_to_one-same.version-skew"]
    assert (same["word"], same["reason"]) == ("Unproven", "fault-not-fired")
    assert result.err.count(": built in") == 2  # what is made of the same is built once
