"""`from ckptdrill import probe` in a job: the observer's probe under a drill, a no-op otherwise.

See `ckptdrill.observer.probe`. Importing it needs no torch unless the job is being drilled.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def _call(name: str, *arguments: Any) -> None:
    if "CKPTDRILL_LAUNCH" in os.environ:
        getattr(importlib.import_module("ckptdrill_observer.probe"), name)(*arguments)


def state(name: str, value: Any) -> None:
    """A piece of training state, of any type that can be saved, as it stands now."""
    _call("state", name, value)


def config(name: str, value: Any) -> None:
    """Configuration that must not differ: a hash of the tokenizer, of the dataset, a template."""
    _call("config", name, value)


def samples(ids: Any) -> None:
    """The identifiers of the samples that the next micro-batch of this rank trains on."""
    _call("samples", ids)
