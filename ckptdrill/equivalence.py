"""Does a warm launch record the same facts as the production command line? Pure.

A warm launch skips the imports, so it may only replace torchrun where it changes nothing that is
judged. The source runs cold and is repeated warm: if any fact of the two differs beyond what every
two processes differ in (time, process ids, ports, their own folders), the rest of the run stays
cold and the packet names the fact.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ckptdrill.model import Fact, LaunchRecord

# What differs between any two launches of the same command, whoever starts them. `counters` are
# whole numbers of the job's own code, among them process ids, ports and clocks.
_OWN = frozenset({"counters", "host", "launcher", "pid", "port", "traceback"})
# How long a thing took, and when: `took_s`, `began_ns`, `ended_at`.
_MEASURED = re.compile(r".*_(s|ms|us|ns|at)")
# Generators that are seeded by the system when nobody seeds them. Where one matters, the batches,
# the losses and the weights that it leads to are compared.
_SYSTEM_SEEDED = frozenset({"numpy", "python"})
# Facts whose order is that of threads and exits, not of the training; memory and imports, of which
# a warm launch has more, and seeding calls, which imports make too; and saved leaves and the job's
# own variables, among them times and paths, whose tensors the states compare anyway.
_NOT_COMPARED = frozenset(
    {
        *("exited", "imported", "inventory", "observer_failed", "rng_set", "stopped"),
        *("uploaded", "usage", "variables"),
    }
)


def equivalent(source: LaunchRecord, repeat: LaunchRecord) -> tuple[bool, str | None]:
    """Whether both launches recorded the same, and the first difference in words.

    Facts are compared rank by rank and kind by kind, in file order.
    """
    if not source.facts:
        return False, "the cold launch recorded no facts"
    for rank in range(source.world_size):
        for kind in sorted({fact.kind for fact in (*source.facts, *repeat.facts)} - _NOT_COMPARED):
            difference = _first_difference(
                _comparable(source, kind, rank), _comparable(repeat, kind, rank)
            )
            if difference is not None:
                return False, f"{kind}, rank {rank}: {difference}"
    return True, None


def _comparable(record: LaunchRecord, kind: str, rank: int) -> list[dict[str, Any]]:
    return [_plain(record, fact) for fact in record.of(kind, rank)]


def _plain(record: LaunchRecord, fact: Fact) -> dict[str, Any]:
    """The fact without what is a launch's own; its folder's name is replaced inside every text."""
    data = {k: v for k, v in fact.data.items() if k not in _OWN and not _MEASURED.fullmatch(k)}
    if fact.kind == "rng" and isinstance(data.get("kinds"), dict):
        data["kinds"] = {k: v for k, v in data["kinds"].items() if k not in _SYSTEM_SEEDED}
    told = {"step": fact.step, **data, "path": record.path(fact)}
    text = json.dumps(told, sort_keys=True, default=dict)
    plain: dict[str, Any] = json.loads(text.replace(f"/{record.launch_id}/", "/LAUNCH/"))
    return plain


def _first_difference(cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> str | None:
    for one, other in zip(cold, warm, strict=False):
        where = _differing_key(one, other, "")
        if where is not None:
            return f"{where} at step {one['step']}"
    if len(cold) != len(warm):
        return f"{len(cold)} facts cold, {len(warm)} warm"
    return None


def _differing_key(one: Any, other: Any, path: str) -> str | None:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            inner = f"{path}.{key}" if path else str(key)
            if key not in one or key not in other:
                return f"{inner} is only recorded {'cold' if key in one else 'warm'}"
            difference = _differing_key(one[key], other[key], inner)
            if difference is not None:
                return difference
        return None
    # Through JSON, so that NaN equals NaN and 1 differs from 1.0.
    if json.dumps(one) == json.dumps(other):
        return None
    texts = (json.dumps(one), json.dumps(other))
    # What both begin with is cut, up to a few characters before they part.
    pairs = enumerate(zip(*texts, strict=False))
    begin = max(0, next((n for n, (a, b) in pairs if a != b), 0) - 20)
    return f"{path} is {_short(texts[0], begin)} cold, {_short(texts[1], begin)} warm"


def _short(text: str, begin: int) -> str:
    """At most some 80 characters of `text`; from `begin` on where it is longer."""
    if len(text) <= 80:
        return text
    return ("..." if begin else "") + text[begin : begin + 77] + "..." * (begin + 77 < len(text))
