"""Compares two checkpoints by logical tensor: the same parameter, however and by whom it is stored.

First the tensors of both are matched by what they are and by name. Each pair is then read block
by block: a digest of each side, and where bytes differ, the largest difference. At last the values
that are no tensors are compared by their digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import xxhash

from ckptdrill.errors import UserError
from ckptdrill.formats import numbers
from ckptdrill.formats.elements import Bytes, Elements, blocks, digest
from ckptdrill.formats.kinds import Kind
from ckptdrill.formats.leaves import Leaf
from ckptdrill.formats.stacks import Checkpoint, Tensor

Label = tuple[str, str]


class Outcome(StrEnum):
    """What came out for one logical tensor or value."""

    SAME = "same"
    WITHIN = "within tolerance"
    DIFFERS = "differs"
    DTYPE = "other dtype"
    SHAPE = "other shape"
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    UNREADABLE = "not read"


_MAX_SHARING = 4
_SMALL_BYTES = 64 << 20
EQUAL = frozenset({Outcome.SAME, Outcome.WITHIN})


@dataclass(frozen=True)
class Row:
    """One logical tensor. `what` is `weights`, `exp_avg` …; differences are None where there is no
    number; `at` is the index of the largest absolute one.
    """

    what: str
    name: str
    outcome: Outcome
    a: Tensor | None = None
    b: Tensor | None = None
    digest_a: str | None = None
    digest_b: str | None = None
    largest_absolute: float | None = None
    largest_relative: float | None = None
    at: tuple[int, ...] | None = None
    detail: str = ""


@dataclass(frozen=True)
class Value:
    """One value that is no tensor, of both sides."""

    what: str
    name: str
    outcome: Outcome
    a: Leaf | None
    b: Leaf | None


def tensors(a: Checkpoint, b: Checkpoint, tolerance: float | None = None) -> Iterator[Row]:
    """A row per logical tensor, by name. Without `tolerance`, equal means equal bits and dtype;
    with it, no element may differ by more (in absolute terms), and dtypes may.

    Raises UserError when a checkpoint claims to hold far more than its files do.
    """
    for checkpoint in (a, b):
        _refuse_claims(checkpoint)
    for (what, name), one, other in _pairs(labelled(a), labelled(b)):
        if one is None or other is None:
            side = Outcome.ONLY_B if one is None else Outcome.ONLY_A
            yield Row(what, name, side, one, other)
            continue
        try:
            yield _compared(what, name, (a, one), (b, other), tolerance)
        except UserError as error:
            yield Row(what, name, Outcome.UNREADABLE, one, other, detail=error.what)


def _refuse_claims(checkpoint: Checkpoint) -> None:
    """Tensors may share bytes, as tied weights do; a small file must not mean endless reading."""
    claimed = sum(tensor.stored.size_bytes for tensor in checkpoint.tensors)
    if claimed > _MAX_SHARING * checkpoint.size_bytes + _SMALL_BYTES:
        raise UserError(
            f"{claimed} bytes of tensors in {checkpoint.size_bytes} bytes of files",
            where=str(checkpoint.path),
            hint="treat the checkpoint as hostile",
        )


def values(a: Checkpoint, b: Checkpoint) -> Iterator[Value]:
    """A row per value that is no tensor."""
    one, other = _leaves(a), _leaves(b)
    for label in sorted(one | other):
        left, right = one.get(label), other.get(label)
        if left is None or right is None:
            outcome = Outcome.ONLY_B if left is None else Outcome.ONLY_A
        else:
            outcome = Outcome.SAME if left.digest == right.digest else Outcome.DIFFERS
        yield Value(*label, outcome, left, right)


def labelled(checkpoint: Checkpoint) -> dict[Label, Tensor]:
    """The tensors by what and name; of two with the same, the later one goes by its full key."""
    found: dict[Label, Tensor] = {}
    for tensor in checkpoint.tensors:
        what = tensor.sort.moment or tensor.sort.kind.value
        label = (what, tensor.sort.name)
        found[(what, tensor.key) if label in found else label] = tensor
    return found


def _leaves(checkpoint: Checkpoint) -> dict[Label, Leaf]:
    found: dict[Label, Leaf] = {}
    for key, sort, leaf in checkpoint.leaves:
        label = (sort.kind.value, sort.name)
        found[(sort.kind.value, key) if label in found else label] = leaf
    return found


def _pairs(
    a: Mapping[Label, Tensor], b: Mapping[Label, Tensor]
) -> Iterator[tuple[Label, Tensor | None, Tensor | None]]:
    """Tensors of the same label; a weight that one side lacks is its master weight there."""
    weight, master = Kind.WEIGHT.value, Kind.MASTER.value
    taken: set[Label] = set()
    for label in sorted({*a, *b}):
        one, other = a.get(label), b.get(label)
        if label in taken:
            continue
        if label[0] == weight and (one is None or other is None):
            stand_in = (master, label[1])
            if one is None and stand_in in a and stand_in not in b:
                one = a[stand_in]
                taken.add(stand_in)
            elif other is None and stand_in in b and stand_in not in a:
                other = b[stand_in]
                taken.add(stand_in)
        yield label, one, other


def _compared(
    what: str,
    name: str,
    a: tuple[Checkpoint, Tensor],
    b: tuple[Checkpoint, Tensor],
    tolerance: float | None,
) -> Row:
    one, other = (Elements(side.root, tensor.stored) for side, tensor in (a, b))
    if one.tensor.shape != other.tensor.shape:
        digests = digest(one), digest(other)
        return Row(what, name, Outcome.SHAPE, a[1], b[1], *digests)
    found = _measured(one, other)
    same_type = one.tensor.dtype == other.tensor.dtype
    if same_type and found.digest_a == found.digest_b:
        outcome = Outcome.SAME
    elif tolerance is not None and found.absolute is not None and found.absolute <= tolerance:
        outcome = Outcome.WITHIN
    else:
        outcome = Outcome.DIFFERS if same_type else Outcome.DTYPE
    return Row(
        what, name, outcome, a[1], b[1], found.digest_a, found.digest_b,
        found.absolute, found.relative, found.at,
    )  # fmt: skip


@dataclass
class _Measured:
    digest_a: str = ""
    digest_b: str = ""
    absolute: float | None = 0.0
    relative: float | None = 0.0
    at: tuple[int, ...] | None = None


def _measured(one: Elements, other: Elements) -> _Measured:
    """Digests and largest differences of two tensors of one shape."""
    found = _Measured()
    hashes = xxhash.xxh3_128(), xxhash.xxh3_128()
    for block in blocks(one.tensor.shape):
        raw = one.block(block), other.block(block)
        for hashed, data in zip(hashes, raw, strict=True):
            hashed.update(np.ascontiguousarray(data).data)
        if one.tensor.dtype != other.tensor.dtype or not np.array_equal(*raw):
            _measure(found, one, other, raw, block.start)
    found.digest_a, found.digest_b = (hashed.hexdigest() for hashed in hashes)
    return found


def _measure(
    found: _Measured, one: Elements, other: Elements, raw: tuple[Bytes, Bytes], start: int
) -> None:
    left = numbers.decode(raw[0], one.tensor.dtype)
    right = numbers.decode(raw[1], other.tensor.dtype)
    if left is None or right is None or found.absolute is None or found.relative is None:
        found.absolute = found.relative = None
        return
    absolute, relative = numbers.distance(left, right)
    worst = int(absolute.argmax())
    if found.at is None or absolute[worst] > found.absolute:
        found.absolute = float(absolute[worst])
        found.at = tuple(int(i) for i in np.unravel_index(start + worst, one.tensor.shape))
    found.relative = max(found.relative, float(relative.max()))
