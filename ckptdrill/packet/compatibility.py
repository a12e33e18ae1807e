"""`resume_compatibility.yaml`: from where to where a run may be resumed, for a launcher. Pure.

One entry per source and target, environments and their versions included, and one more for each
conversion between them: what is verified of its result says nothing of the checkpoint itself. It is
`verified` only if every cell there whose claim is that the training continues is Pass and the
source stayed as it was; everything else is `blocked_until_drill_passes`. `decide` is the reader's
side: what is not written as verified is not allowed, and neither is what cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ckptdrill.model import Claim, JsonValue, Topology, VerdictWord
from ckptdrill.packet.view import CellView, PacketView

VERIFIED = "verified"
BLOCKED = "blocked_until_drill_passes"
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
_VERSIONS = ("python", "torch", "cuda")
# What tells a layout from others; a world size alone does not.
_LAYOUT = {"name", "short", "dp", *DEGREES}
_KNOWN = {"name", "short", "world_size", "zero_stage", "environment", "dp", *DEGREES, *_VERSIONS}
_KNOWN |= {"conversion"}


def render(view: PacketView) -> str:
    """The text of resume_compatibility.yaml."""
    value = {
        "matrix": view.run.matrix,
        "ended_utc": view.run.ended_utc or None,
        "resume_compatibility": list(_entries(view)),
    }
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=False, width=100)


def _entries(view: PacketView) -> Iterator[dict[str, JsonValue]]:
    routes: dict[str, list[CellView]] = {}
    for cell in sorted(view.cells, key=lambda cell: cell.id):
        if cell.cell is not None and cell.claim == Claim.CONTINUES:
            via = cell.cell.conversion or ""
            routes.setdefault(f"{cell.source} -> {cell.target} {via}", []).append(cell)
    for cells in routes.values():
        at = cells[0].cell
        if at is not None:
            held = all(cell.word is VerdictWord.PASS for cell in cells)
            yield {
                "from": _place(view, at.source, at.source_environment),
                "to": {
                    **_place(view, at.target, at.target_environment),
                    **({"conversion": at.conversion} if at.conversion else {}),
                },
                "status": VERIFIED if held and view.run.source_unchanged is True else BLOCKED,
                "cells": {cell.id: f"{cell.word} ({cell.reason})" for cell in cells},
            }


def _place(view: PacketView, topology: Topology, environment: str) -> dict[str, JsonValue]:
    recorded = view.run.raw.get("environments")
    versions = recorded.get(environment) if isinstance(recorded, Mapping) else None
    known = versions if isinstance(versions, Mapping) else {}
    return {
        "name": topology.name,
        "short": topology.short,
        "world_size": topology.world_size,
        **{degree: getattr(topology, degree) for degree in DEGREES},
        "zero_stage": topology.zero_stage,
        "environment": environment,
        **{name: known.get(name) for name in _VERSIONS},
    }


# --------------------------------------------------------------------------------------------------
# The reader's side


@dataclass(frozen=True)
class Decision:
    """Whether a resume is allowed, and why in words."""

    allowed: bool
    why: str


def decide(text: str | bytes, source: str, target: str) -> Decision:
    """Whether the file allows to resume `source` as `target`.

    Both are a name or short name (`fsdp4`), or `key=value` pairs: with any degree among them, those
    that are left out are 1. What was restored from a conversion counts only for a target that names
    it (`name=fsdp4,conversion=universal`). Whatever is missing, unreadable or ambiguous is not
    allowed.
    """
    try:
        return _decided(_read(text), source, target)
    except (
        yaml.YAMLError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        return Decision(False, f"the file cannot be used: {' '.join(str(error).split())[:200]}")


def _decided(entries: Sequence[Mapping[str, Any]], source: str, target: str) -> Decision:
    found = [e for e in entries if _fits(e["from"], source) and _fits(e["to"], target)]
    route = f"{source} -> {target}"
    if not found:
        return Decision(False, f"{route} was not drilled")
    blocked = [entry for entry in found if entry["status"] != VERIFIED]
    if blocked:
        return Decision(False, f"{route}: {blocked[0]['status']}: {_cells(blocked[0])}")
    return Decision(True, f"{route}: verified: {_cells(found[0])}")


def _read(text: str | bytes) -> Sequence[Mapping[str, Any]]:
    value = yaml.safe_load(text)
    entries = value.get("resume_compatibility") if isinstance(value, Mapping) else None
    if not isinstance(entries, list):
        raise TypeError("it holds no list resume_compatibility")
    return entries


def _fits(place: Mapping[str, Any], wanted: str) -> bool:
    """Whether `place` is what a name or `key=value` pairs ask for, every pair compared."""
    if "=" not in wanted:
        return wanted in (place["name"], place["short"]) and not place.get("conversion")
    pairs = dict(_pairs(wanted))
    if not pairs.keys() & _LAYOUT:
        raise ValueError(f"{wanted!r} names no topology: give its name or its degrees")
    if pairs.keys() & {*DEGREES, "dp"}:
        left_out = ("dp_replicate", "dp_shard") if "dp" not in pairs else ()
        pairs = dict.fromkeys(("tp", "pp", "cp", "ep", *left_out), "1") | pairs
    pairs = {"conversion": "None"} | pairs
    have = {"conversion": None, **place, "dp": place["dp_replicate"] * place["dp_shard"]}
    return all(str(have[name]) == value for name, value in pairs.items())


def _pairs(wanted: str) -> Iterator[tuple[str, str]]:
    for part in wanted.split(","):
        found = re.fullmatch(r"\s*([a-z_]+)\s*=\s*(\S+)\s*", part)
        if found is None or found[1] not in _KNOWN:
            raise ValueError(f"{part.strip()!r} is not one of {', '.join(sorted(_KNOWN))}=VALUE")
        yield found[1], found[2]


def _cells(entry: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {verdict}" for name, verdict in entry["cells"].items())
