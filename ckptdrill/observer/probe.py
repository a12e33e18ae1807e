"""For the author of a job: tell a drill what only you know. Outside a drill nothing happens.

    try:
        from ckptdrill_observer import probe
    except ImportError:  # not under a drill
        probe = None

    if probe:
        probe.state("curriculum.level", level)      # compared with the reference at the same step
        probe.samples(sample_ids)                   # the batch by its ids instead of its content
        probe.config("tokenizer", tokenizer_sha256) # must be equal in source and restored run

Where ckptdrill is installed in the job's environment, `from ckptdrill import probe` is the same
without the `try`. A call costs one line in a file; it never raises and never communicates.
"""

from __future__ import annotations

from typing import Any

from . import inventory
from .facts import Recorder

_recorder: Recorder | None = None


def attach(recorder: Recorder) -> None:
    """Called by the observer when the job runs under a drill."""
    global _recorder
    _recorder = recorder


def active() -> bool:
    """True under a drill."""
    return _recorder is not None


def state(name: str, value: Any) -> None:
    """A piece of training state, of any type that can be saved, as it stands now."""
    _record("state", name, value)


def config(name: str, value: Any) -> None:
    """Configuration that must not differ: a hash of the tokenizer, of the dataset, a template."""
    _record("config", name, value)


def samples(ids: Any) -> None:
    """The identifiers of the samples that the next micro-batch of this rank trains on."""
    if _recorder is not None:
        _recorder.guarded(_record_samples)(ids)


def _record(kind: str, name: str, value: Any) -> None:
    if _recorder is not None:
        _recorder.guarded(_record_leaves)(kind, name, value)


def _record_leaves(kind: str, name: str, value: Any) -> None:
    if _recorder is not None:
        _recorder.record("probe", what=kind, name=name, leaves=inventory.leaves(value))


def _record_samples(ids: Any) -> None:
    if _recorder is not None:
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        _recorder.record("samples", rows=[str(value) for value in values])
