"""packet.json keeps to the schema that ships with it, and the schema to the nouns."""

import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import pytest

from ckptdrill.errors import ExitCode
from ckptdrill.model import Claim, Held, Item, Reason, VerdictWord
from ckptdrill.packet import StoredCell, build, machine, packet_schema

Passing = Callable[[str], StoredCell]
_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
    "null": type(None),
}
_UNDERSTOOD = {
    "$schema",
    "$defs",
    "$ref",
    "title",
    "description",
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "const",
    "anyOf",
}


def violations(schema: dict[str, Any], value: object, where: str = "$") -> Iterator[str]:
    """What the part of JSON Schema that ours uses has to say about `value`."""
    assert schema.keys() <= _UNDERSTOOD, f"the test does not know {schema.keys() - _UNDERSTOOD}"
    if "$ref" in schema:
        schema = packet_schema()["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema and all(list(violations(one, value, where)) for one in schema["anyOf"]):
        yield f"{where}: none of the alternatives"
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{where}: {value!r} is not allowed"
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(isinstance(value, _TYPES[name]) for name in types):
        yield f"{where}: {value!r} is no {types}"
    if isinstance(value, dict):
        yield from member_violations(schema, value, where)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from violations(schema["items"], item, f"{where}[{index}]")


def member_violations(schema: dict[str, Any], value: dict[str, Any], where: str) -> Iterator[str]:
    known = schema.get("properties", {})
    yield from (f"{where}: no {name}" for name in schema.get("required", ()) if name not in value)
    for name, item in value.items():
        if name in known:
            yield from violations(known[name], item, f"{where}.{name}")
        elif not schema.get("additionalProperties", True):
            yield f"{where}: {name} is not in the schema"


def test_a_packet_keeps_to_the_schema(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    cells = [*all_three, StoredCell("e-nothing")]
    packet = json.loads(machine.render(build(run_json, cells)))
    assert list(violations(packet_schema(), packet)) == []
    assert [cell["id"] for cell in packet["cells"]] == sorted(cell.id for cell in cells)


def test_an_empty_packet_keeps_to_the_schema() -> None:
    packet = json.loads(machine.render(build({}, [])))
    assert list(violations(packet_schema(), packet)) == []


def test_the_schema_can_say_no(run_json: dict[str, Any], passing: Passing) -> None:
    packet = json.loads(machine.render(build(run_json, [passing("a")])))
    packet["cells"][0]["verdict"] = "Fine"
    del packet["summary"]["headline"]
    assert len(list(violations(packet_schema(), packet))) == 2


@pytest.mark.parametrize(
    ("name", "noun"),
    [("verdict", VerdictWord), ("reason", Reason), ("item", Item), ("status", Held)],
)
def test_the_schema_lists_the_closed_lists(name: str, noun: type[StrEnum]) -> None:
    assert packet_schema()["$defs"][name]["enum"] == [member.value for member in noun]


def test_the_schema_lists_claims_and_exit_codes() -> None:
    schema = packet_schema()
    assert schema["$defs"]["cell"]["properties"]["claim"]["enum"] == [c.value for c in Claim]
    code = schema["properties"]["summary"]["properties"]["exit_code"]
    assert set(code["enum"]) - {ExitCode.INTERNAL} >= {
        ExitCode.AS_EXPECTED,
        ExitCode.UNSUPPORTED,
        ExitCode.UNPROVEN,
        ExitCode.SOURCE_CHANGED,
    }


def test_numbers_that_json_cannot_write_become_text(
    run_json: dict[str, Any], passing: Passing
) -> None:
    cell = passing("a")
    numbers = {"restored": [float("nan"), float("inf"), -float("inf"), 1.0]}
    cell.verdict["checks"][0]["numbers"] = numbers

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    text = machine.render(build(run_json, [cell]))
    packet = json.loads(text, parse_constant=refuse)
    found = packet["cells"][0]["checks"][0]["numbers"]["restored"]
    assert found == ["NaN", "Infinity", "-Infinity", 1.0]
