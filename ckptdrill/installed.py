"""What an interpreter has installed of the things that decide whether a checkpoint can be resumed.

It is asked by its own package metadata, without importing anything heavy, and in the same way when
a run begins and when a gate looks at the environment that will run: what is equal then is equal.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

# Distributions that write, read or shape a training state; whatever else differs is not compared.
FRAMEWORKS = (
    "torch",
    "numpy",
    "accelerate",
    "apex",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "lightning",
    "megatron-core",
    "nemo-automodel",
    "nemo-toolkit",
    "orbax-checkpoint",
    "pytorch-lightning",
    "safetensors",
    "torchdata",
    "torchtitan",
    "transformer-engine",
    "transformers",
)
_LOOK = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_TIMEOUT_S = 60


def installed(python: str) -> Mapping[str, str] | None:
    """Versions by name: `python`, and of FRAMEWORKS those that are there. None when the
    interpreter cannot be asked.
    """
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, *FRAMEWORKS],
            capture_output=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return {str(name): str(version) for name, version in found.items()}
