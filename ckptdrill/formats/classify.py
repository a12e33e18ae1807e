"""Says what a checkpoint is good for: model-only, resumable, universal or incomplete, and why.

Pure: it looks at keys, shapes and ranges that were read before. First whatever is missing or torn
makes it incomplete; then the state it holds decides. "Resumable" means that weights and optimizer
are there; what else a continuation needs and the files do not hold is named beside it, because only
a drill can show whether the job brings it back by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ckptdrill.formats import universal
from ckptdrill.formats.kinds import Kind
from ckptdrill.formats.stacks import Checkpoint, Tensor


class Usable(StrEnum):
    """The class of a checkpoint."""

    MODEL_ONLY = "model-only"
    RESUMABLE = "resumable"
    UNIVERSAL = "universal"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True)
class Evidence:
    """How many keys hold one kind of state, and one of them; none when `count` is 0."""

    kind: Kind
    count: int
    example: str


@dataclass(frozen=True)
class Classification:
    """The class, the reasons for it, and what was found of each kind of state."""

    usable: Usable
    because: tuple[str, ...]
    evidence: tuple[Evidence, ...]


_NEEDED_TO_CONTINUE = (Kind.SCHEDULER, Kind.STEP, Kind.RNG, Kind.DATA)
# Of each pair, whoever has the first has the second.
_PAIRS = (("exp_avg", "exp_avg_sq"), ("mu", "nu"))
_MAX_NAMED = 8


def classify(checkpoint: Checkpoint) -> Classification:
    """The class of a checkpoint, with the evidence."""
    evidence = _evidence(checkpoint)
    found = {each.kind: each.count for each in evidence}
    problems = [*checkpoint.problems, *_holes(checkpoint), *_half_moments(checkpoint)]
    if not found[Kind.WEIGHT] + found[Kind.MASTER]:
        problems.append("no weights")
    if problems:
        return Classification(Usable.INCOMPLETE, _cut(problems), evidence)
    optimizer = found[Kind.MOMENT] + found[Kind.GROUPS]
    if not optimizer:
        said = "weights are there, and no state of an optimizer is in any file"
        return Classification(Usable.MODEL_ONLY, (said,), evidence)
    usable = Usable.UNIVERSAL if checkpoint.form == universal.NAME else Usable.RESUMABLE
    return Classification(usable, tuple(_held(checkpoint, found)), evidence)


def _evidence(checkpoint: Checkpoint) -> tuple[Evidence, ...]:
    keys: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    for tensor in checkpoint.tensors:
        keys[tensor.sort.kind].append(tensor.key)
    for key, sort, leaf in checkpoint.leaves:
        if leaf.says:
            keys[sort.kind].append(key)
    return tuple(Evidence(k, len(found), found[0] if found else "") for k, found in keys.items())


def _held(checkpoint: Checkpoint, found: dict[Kind, int]) -> Iterator[str]:
    weights = _names(checkpoint, Kind.WEIGHT) | _names(checkpoint, Kind.MASTER)
    moments = _names(checkpoint, Kind.MOMENT)
    if moments:
        yield f"{len(weights)} weights, and moments of {len(moments)} parameters"
    else:
        yield f"{len(weights)} weights, and parameter groups without moments"
    without = sorted(weights - moments)
    if without and moments <= weights and moments:
        yield f"no moments of {', '.join(_cut(without))} (buffers and frozen parameters have none)"
    missing = [kind.value for kind in _NEEDED_TO_CONTINUE if not found[kind]]
    if missing:
        yield f"not in the files: {', '.join(missing)}; only a drill shows whether they come back"


def _names(checkpoint: Checkpoint, kind: Kind) -> set[str]:
    return {tensor.sort.name for tensor in checkpoint.tensors if tensor.sort.kind is kind}


def _half_moments(checkpoint: Checkpoint) -> Iterator[str]:
    """Parameters with one moment of a pair and without the other."""
    for first, second in _PAIRS:
        one, other = (
            {t.sort.name for t in checkpoint.tensors if t.sort.moment == moment}
            for moment in (first, second)
        )
        for lacking, moment in ((one - other, second), (other - one, first)):
            if lacking:
                yield f"{moment} is missing for {', '.join(_cut(sorted(lacking)))}"


def _holes(checkpoint: Checkpoint) -> Iterator[str]:
    """Tensors of which the chunks hold fewer elements than the shape has."""
    for tensor in checkpoint.tensors:
        wanted = math.prod(tensor.stored.shape)
        held = sum(chunk.elements for chunk in tensor.stored.chunks)
        if held < wanted and (tensor.stored.chunks or tensor.stored.flat):
            yield f"{tensor.key} has {held} of {wanted} elements"


def _cut(said: list[str]) -> tuple[str, ...]:
    """The first few; how many more there are is the last."""
    more = len(said) - _MAX_NAMED
    return (*said[:_MAX_NAMED], *([f"… and {more} more"] if more > 0 else []))


def has_elements(tensor: Tensor) -> bool:
    """Whether the files hold every element of a tensor in a form that can be read."""
    held = sum(chunk.elements for chunk in tensor.stored.chunks)
    return held >= math.prod(tensor.stored.shape) and bool(tensor.stored.chunks)
