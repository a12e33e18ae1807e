"""DeepSpeed's universal checkpoints: a folder per parameter with its master weight and moments.

Signature: files `zero/<parameter>/fp32.pt` of torch.save. Each holds one whole tensor, whatever
the parallelism was; that is what makes the checkpoint universal.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator

from ckptdrill.formats import contents, deepspeed
from ckptdrill.formats.contents import Found, Holdings, Part
from ckptdrill.formats.layout import TensorMeta

NAME = "deepspeed-universal"
COMMIT = "none in the folder: the pointer latest_universal beside it is written last"
_STATE = re.compile(r"zero/(?P<name>[^/]+)/(?P<state>[a-z0-9_]+)\.pt")
_MASTER = "fp32"
_COMMON = "common"


def recognises(found: Found) -> bool:
    """By its folders of parameters."""
    matches = (_STATE.fullmatch(part.path) for part in found.parts)
    return any(match is not None and match["state"] == _MASTER for match in matches)


def holdings(found: Found) -> Holdings:
    """Parameters by the names of their folders; one that lacks a state others have is a problem."""
    held = contents.placed(found, _place)
    shapes, buffers = deepspeed.shapes(found), deepspeed.buffers(found)
    tensors = {
        key: _shaped(tensor, shapes.get(_parameter(key)))
        for key, tensor in deepspeed.under_model(_of_parameters(held)).items()
        if _parameter(key) not in buffers
    }
    lacking = _lacking(found, buffers, trained=shapes.keys())
    whole = Holdings(tensors, held.leaves, held.versions, held.problems, held.notes)
    return whole.also(problems=lacking)


def _of_parameters(held: Holdings) -> dict[str, TensorMeta]:
    """Without the flat shards of one rank that are copied along, and what ZeRO 3 had emptied."""
    return {
        key.removesuffix(".param"): tensor
        for key, tensor in held.tensors.items()
        if not key.startswith(_COMMON) and tensor.shape != (0,) and not deepspeed.repeated(key)
    }


def _parameter(key: str) -> str:
    """The parameter that a placed key of `zero/` belongs to; nothing for other keys."""
    if key.startswith("master."):
        return key.removeprefix("master.")
    return key.removeprefix("optimizer.state.").rpartition(".")[0]


def _shaped(tensor: TensorMeta, shape: tuple[int, ...] | None) -> TensorMeta:
    """From ZeRO 3 come flattened parameters: the model states know their shapes."""
    if shape is None or tensor.shape != (math.prod(shape),) or tensor.shape == shape:
        return tensor
    return dataclasses.replace(tensor, shape=shape, flat=True)


def _place(part: Part) -> str | None:
    match = _STATE.fullmatch(part.path)
    if match is None:
        return _COMMON if part.path == "zero/optimizer_state.pt" else ""
    if match["state"] == _MASTER:
        return f"master.{match['name']}"
    return f"optimizer.state.{match['name']}.{match['state']}"


def _lacking(found: Found, buffers: frozenset[str], trained: Collection[str]) -> Iterator[str]:
    """Parameters without a file that others have. Where the model states name what is `trained`,
    all of it must be there, and what is not among it (frozen) has no moments.
    """
    states: dict[str, set[str]] = {}
    for match in found.matching(_STATE.pattern):
        states.setdefault(match["name"], set()).add(match["state"])
    counted = Counter(state for held in states.values() for state in held)
    usual = {state for state, count in counted.items() if count * 2 > len(states)}
    for name in sorted(set(trained) - states.keys()):
        yield f"{name} is missing: the model states name it, and there is no folder of it"
    for name, held in states.items():
        wanted = usual if not trained or name in trained else {_MASTER}
        for state in sorted(wanted - held):
            if name not in buffers:
                yield f"{name} has no {state}.pt, which other parameters have"
