"""`packet.json`: the packet for release tooling, versioned, and the JSON Schema it keeps to. Pure.

Cells are sorted by id and keys by name, one cell per line: two packets can be compared line by
line, and a thousand cells are written by the fast encoder, which cannot indent. JSON has no word
for `nan` and `inf`, which a diverging loss produces: here they are the texts `NaN`, `Infinity` and
`-Infinity`, as the schema says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptdrill.model import Cell, JsonValue, Topology, VerdictWord, to_json
from ckptdrill.packet import documented, text
from ckptdrill.packet.run import RunView
from ckptdrill.packet.view import CellView, CheckView, FactRef, PacketView

PACKET_VERSION = 1
_SCHEMA = Path(__file__).with_name("packet.schema.json")


def packet_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of packet.json."""
    schema: dict[str, Any] = json.loads(_SCHEMA.read_bytes())
    return schema


def render(view: PacketView) -> str:
    """The text of packet.json, plain ASCII, ending with a line feed."""
    cells = sorted(view.cells, key=lambda cell: cell.id)
    members = {
        "cells": "[\n" + ",\n".join(_line(_cell(cell)) for cell in cells) + "\n]",
        **{name: _line(value) for name, value in _head(view).items()},
    }
    return "{\n" + ",\n".join(f'"{name}": {members[name]}' for name in sorted(members)) + "\n}\n"


def _line(value: JsonValue) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except ValueError:
        return json.dumps(_strict(value), sort_keys=True, allow_nan=False)


def _head(view: PacketView) -> dict[str, JsonValue]:
    return {
        "packet_version": PACKET_VERSION,
        "run": _run(view.run),
        "documentation": _documentation(view),
        "summary": {
            "headline": view.headline,
            "cells": len(view.cells),
            "pass": view.counts[VerdictWord.PASS],
            "unsupported": view.counts[VerdictWord.UNSUPPORTED],
            "unproven": view.counts[VerdictWord.UNPROVEN],
            "diverged": view.diverged,
            "against_expectation": view.unexpected,
            "exit_code": int(view.exit_code),
            "exit_meaning": view.exit_meaning,
            "source_unchanged": view.run.source_unchanged,
        },
    }


def _documentation(view: PacketView) -> dict[str, JsonValue]:
    """The stack that the matrix names, and every claim that a cell cites."""
    return {
        "stack": to_json(view.run.stack),
        "disagreements": len(view.disagreements),
        "claims": dict(documented.cited(cell.documented for cell in view.cells)),
    }


def _run(run: RunView) -> dict[str, JsonValue]:
    """run.json as it is, under the names that every packet has."""
    return {
        "matrix": run.matrix,
        "status": run.status,
        "started_utc": run.started_utc or None,
        "ended_utc": run.ended_utc or None,
        "sources": to_json(run.sources),
        "recorded": run.raw,
        "not_recorded": list(run.missing),
    }


def _cell(view: CellView) -> dict[str, JsonValue]:
    return {
        "id": view.id,
        "verdict": view.word,
        "reason": view.reason,
        "explanation": view.explanation,
        "claim": view.claim,
        "blame": {"item": view.blame_item, "subject": view.blame_subject},
        "next_move": view.next_move,
        "expected": view.expected,
        "expectation": to_json(view.expectation),
        "planned_path": view.planned,
        "address": None if view.cell is None else _address(view.cell),
        "checks": [_check(check) for check in view.checks],
        "not_judged": list(view.not_judged),
        "facts": _refs(view.facts),
        "launches": to_json(view.launches),
        "manifests": to_json(view.manifests),
        "damage": to_json(view.damage),
        "restore": _restore(view),
        "replay": view.replay,
        "repro": view.repro,
        "documented": documented.as_json(view.documented),
    }


def _address(cell: Cell) -> dict[str, JsonValue]:
    return {
        "source": _topology(cell.source, cell.source_environment),
        "target": _topology(cell.target, cell.target_environment),
        "drill": cell.drill,
        "parameters": to_json(cell.parameters),
        "conversion": cell.conversion,
    }


def _topology(topology: Topology, environment: str) -> dict[str, JsonValue]:
    return {
        "topology": to_json(topology),
        "short": topology.short,
        "world_size": topology.world_size,
        "environment": environment,
    }


def _check(check: CheckView) -> dict[str, JsonValue]:
    return {
        "item": check.item,
        "status": check.status,
        "summary": check.summary,
        "subjects": list(check.subjects),
        "details": list(check.details),
        "next_move": check.next_move,
        "facts": _refs(check.facts),
        "numbers": check.numbers,
    }


def _restore(view: CellView) -> dict[str, JsonValue] | None:
    if view.phases is None:
        return None
    return {
        "phases_s": dict(view.phases.seconds),
        "not_measured": list(view.phases.missing),
        "merged": list(view.phases.merged),
        "wall_s": view.phases.wall_s,
        "step_s": step_s if text.is_number(step_s := view.numbers.get("step_s")) else None,
        "tiers": view.numbers.get("tiers"),
    }


def _refs(facts: tuple[FactRef, ...]) -> list[JsonValue]:
    return [fact.ref for fact in facts]


def _strict(value: JsonValue) -> JsonValue:
    """`value` with every number that JSON cannot write as text."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
