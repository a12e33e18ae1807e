"""Add up what each rank said of its shards into one logical tensor per name. No tensors here.

An entry is [dtype, global shape, offsets, sizes, digest]; digests of the distinct shards sum, word
by
word mod 2**64, to the digest of the whole tensor, whatever the layout. Ranks that report the same
shard are replicas and must agree; where they do not, that is a finding of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckptdrill.columns import Part
from ckptdrill.judge import lanes
from ckptdrill.model import Fact, JsonValue

_WORD = 1 << 64


@dataclass(frozen=True)
class Logical:
    """One named leaf over all ranks. For plain values `dtype` is "value" and `digest` its text."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    complete: bool = True
    by_rank: tuple[tuple[int, str], ...] = ()  # only where replicas differ: (rank, digest)

    @property
    def content(self) -> tuple[str, tuple[int, ...], str]:
        """What two equal tensors have in common, whatever their names."""
        return self.dtype, self.shape, self.digest

    @property
    def replicas_differ(self) -> bool:
        """Ranks hold different content under one name and place."""
        return bool(self.by_rank)


def combine(facts: Iterable[Fact], part: str) -> Mapping[str, Logical]:
    """The logical leaves of one part (`weights`, `buffers`, `optimizer`) of a sampled state."""
    return _combined(Same(facts), part)


class Same:
    """Facts as the key of a cache: the same objects, which nobody changes. Cells share their source
    run, whose tensors need adding up only once.
    """

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = tuple(facts)
        self._ids = tuple(map(id, self.facts))

    def __hash__(self) -> int:
        return hash(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._ids == other._ids


@lru_cache(maxsize=64)
def _combined(facts: Same, part: str) -> Mapping[str, Logical]:
    summed = columnar(facts.facts, part)
    if summed is not None:
        return summed
    gathered: dict[str, list[tuple[int, JsonValue]]] = {}
    for fact in facts.facts:
        for name, entry in fact.data.get(part, {}).items():
            gathered.setdefault(name, []).append((fact.rank, _entry(entry)))
    return {name: _logical(name, entries) for name, entries in gathered.items()}


def columnar(facts: Sequence[Fact], part: str) -> Mapping[str, Logical] | None:
    """The same from columns as they stand; None where a fact has none, or ranks have other names.

    Leaves of which ranks hold different values are looked at one by one.
    """
    parts = [fact.data.get(part) for fact in facts]
    columns = tuple(each for each in parts if isinstance(each, Part))
    if not parts or len(columns) != len(parts):
        return None
    return _added(tuple(fact.rank for fact in facts), columns)


@lru_cache(maxsize=256)
def _added(ranks: tuple[int, ...], columns: tuple[Part, ...]) -> Mapping[str, Logical] | None:
    # Parts that are equal byte for byte are one object (ckptdrill/columns.py): a state that came
    # back whole is added up once for all the launches that it came back in.
    scheme = lanes.scheme(tuple(each.layout for each in columns))
    if scheme is None:
        return None
    digests, differ = lanes.added(columns, scheme)
    found = {
        whole.name: Logical(whole.name, whole.dtype, whole.shape, digest, whole.complete)
        for whole, digest in zip(scheme.tensors, digests, strict=True)
    }
    held = list(zip(ranks, columns, strict=True))
    for name in (w.name for w, other in zip(scheme.tensors, differ, strict=True) if other):
        found[name] = _logical(name, [(rank, _entry(each[name])) for rank, each in held])
    equal = len({repr(each.plain) for each in columns}) == 1 and not columns[0].layout.has_lists
    asked = held[: 1 if equal else None]
    for name in columns[0].layout.others:
        found[name] = _value(name, [(rank, each[name]) for rank, each in asked])
    return found


def _entry(leaf: JsonValue) -> JsonValue:
    """The fingerprint entry of a tensor, which a saved leaf wraps."""
    return leaf.get("entry", leaf) if isinstance(leaf, dict) else leaf


def is_entry(value: JsonValue) -> bool:
    """True for a tensor entry, False for a plain value."""
    return (
        isinstance(value, list)
        and len(value) == 5
        and isinstance(value[0], str)
        and isinstance(value[1], list)
        and isinstance(value[4], str)
    )


def _logical(name: str, entries: list[tuple[int, JsonValue]]) -> Logical:
    if not all(is_entry(entry) for _, entry in entries):
        return _value(name, entries)
    shards: dict[tuple[int, ...], dict[str, list[int]]] = {}
    covered = 0
    if any(lanes.is_pending(entry) for _, entry in entries):  # no value to compare
        return Logical(name, entries[0][1][0], tuple(entries[0][1][1]), "", complete=False)
    for rank, (_, _, offsets, sizes, digest) in entries:
        place = (*offsets, *sizes)
        if place not in shards:
            covered += math.prod(sizes)
        shards.setdefault(place, {}).setdefault(digest, []).append(rank)
    dtype, shape = entries[0][1][0], tuple(entries[0][1][1])
    differing = [
        (rank, digest)
        for held in shards.values()
        if len(held) > 1
        for digest, ranks in held.items()
        for rank in ranks
    ]
    total = _sum(next(iter(held)) for held in shards.values())
    return Logical(name, dtype, shape, total, covered >= math.prod(shape), tuple(sorted(differing)))


def _value(name: str, entries: list[tuple[int, JsonValue]]) -> Logical:
    if any(isinstance(entry, str) and entry.startswith("<") for _, entry in entries):
        return Logical(name, "value", (), "", complete=False)  # named, but not digested
    texts = {rank: repr(entry) for rank, entry in entries}
    differing = tuple(sorted(texts.items())) if len(set(texts.values())) > 1 else ()
    return Logical(name, "value", (), texts[min(texts)], by_rank=differing)


def _sum(digests: Iterable[str]) -> str:
    high = low = 0
    for digest in digests:
        high = (high + int(digest[:16], 16)) % _WORD
        low = (low + int(digest[16:], 16)) % _WORD
    return f"{high:016x}{low:016x}"


def quoted(value: JsonValue) -> str:
    """A plain value as a sentence quotes it: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
