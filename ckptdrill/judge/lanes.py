"""Add up the columns of all ranks at once, as `logical` does it leaf by leaf.

The digests of one rank are one long whole number. Both 64-bit words of every tensor get a lane of
128 bits in it, so that a sum over ranks cannot carry into the next lane, and one addition of whole
numbers adds up all tensors of a rank. Which lanes count (replicas count once, and must agree) is
the layouts' matter alone: it is worked out once for all launches that share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckptdrill.columns import DIGEST_DIGITS, Form, Layout, Part
from ckptdrill.model import JsonValue

_LANE_BITS = 4 * DIGEST_DIGITS
_WORD_BITS = _LANE_BITS // 2


def is_pending(entry: Sequence[JsonValue]) -> bool:
    """Whether a rank holds its term of a sum that ranks have still to make: a DTensor whose
    placement is partial. Nothing of it adds up but what is linear.
    """
    return bool(entry[2][:1] == ["partial"])


@dataclass(frozen=True)
class Whole:
    """What the layouts say of one logical tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    complete: bool


@dataclass(frozen=True)
class Scheme:
    """How the columns of these ranks add up.

    `counted` has one mask per rank: the lanes of which it is the first to hold the shard.
    `replicas` has for every rank (earlier rank, mask of the lanes in which both must agree).
    `words` is the low half of every lane.
    """

    tensors: tuple[Whole, ...]
    counted: tuple[int, ...]
    replicas: tuple[tuple[tuple[int, int], ...], ...]
    words: int


@lru_cache(maxsize=1024)
def scheme(layouts: tuple[Layout, ...]) -> Scheme | None:
    """The scheme of these ranks; None where it takes a look at every leaf: other names on other
    ranks, or sums that are still to be made over ranks.
    """
    names = layouts[0].tensors
    if any(each.tensors != names or each.others != layouts[0].others for each in layouts):
        return None
    if any(is_pending(form.head) for each in layouts for form in _tensors(each)):
        return None
    counted = [0] * len(layouts)
    replicas: list[dict[int, int]] = [{} for _ in layouts]
    tensors = []
    for position, name in enumerate(names):
        lane = ((1 << _LANE_BITS) - 1) << _LANE_BITS * (len(names) - 1 - position)
        dtype, shape, *_ = layouts[0].forms[name].head
        first: dict[str, int] = {}
        covered = 0
        for rank, layout in enumerate(layouts):
            _, _, offsets, sizes = layout.forms[name].head
            owner = first.setdefault(repr((*offsets, *sizes)), rank)
            if owner == rank:
                counted[rank] |= lane
                covered += math.prod(sizes)
            else:
                replicas[rank][owner] = replicas[rank].get(owner, 0) | lane
        tensors.append(Whole(name, dtype, tuple(shape), covered >= math.prod(shape)))
    words = sum(((1 << _WORD_BITS) - 1) << _LANE_BITS * n for n in range(len(names)))
    return Scheme(
        tuple(tensors), tuple(counted), tuple(tuple(each.items()) for each in replicas), words
    )


def added(parts: Sequence[Part], scheme: Scheme) -> tuple[list[str], list[bool]]:
    """For each tensor its digest over all ranks, and whether replicas differ (there is none then).

    Digests are 32 hex digits: two words, each summed modulo 2**64.
    """
    low = high = different = 0
    columns: list[int] = []
    for part, counted, replicas in zip(parts, scheme.counted, scheme.replicas, strict=True):
        column = int(part.digests or "0", 16)
        columns.append(column)
        for owner, mask in replicas:
            different |= (column ^ columns[owner]) & mask
        low += column & counted & scheme.words
        high += (column & counted) >> _WORD_BITS & scheme.words
    total = (high & scheme.words) << _WORD_BITS | low & scheme.words
    lanes, marks = (_lanes(number, len(scheme.tensors)) for number in (total, different))
    return lanes, [bool(mark.strip("0")) for mark in marks]


def _lanes(number: int, count: int) -> list[str]:
    digits = f"{number:0{count * DIGEST_DIGITS}x}"
    return [
        digits[at : at + DIGEST_DIGITS] for at in range(0, count * DIGEST_DIGITS, DIGEST_DIGITS)
    ]


def _tensors(layout: Layout) -> list[Form]:
    return [layout.forms[name] for name in layout.tensors]
