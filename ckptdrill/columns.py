"""Read back the columns in which the observer writes many named leaves. Pure.

ckptdrill/observer/columns.py says what they look like. A `Part` is the mapping from names to leaves
that the columns stand for. Whoever adds up whole parts over many ranks takes the columns as they
are, which is why layouts are made once per content: ranks and launches of one topology share them,
and what a layout implies is then worked out once for all of them.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import msgspec

from ckptdrill.model import COMMON_KINDS, JsonValue

DIGEST_DIGITS = 32
# Distinct layouts kept: some ten for each rank of a topology, for several topologies.
_LAYOUTS = 16_384
# Lines kept: those of a few topologies. Long ones, of large models, would fill the memory.
_LINES = 32_768
_LONG_LINE_BYTES = 16_384
_decode = msgspec.json.Decoder().decode
# Where facts have columns, by their kind.
WITH_COLUMNS = {
    "state": ("weights", "buffers", "optimizer", "projections", "movable"),
    "inventory": ("leaves", "movable"),
    "gradient": ("leaves",),
    "restored": ("values",),
}


@dataclass(frozen=True, eq=False)
class Form:
    """What a leaf is, and where in the columns its content stands.

    `kind` is `entry` (a fingerprint entry), `leaf` (an entry as a saved leaf has it, with or
    without a projection), `floats` (a list of `count`) or `value` (anything plain). `head` is the
    entry without its digest. `at` counts digests for tensors and plain values for values.
    """

    kind: str
    head: list[JsonValue]
    at: int
    float_at: int
    count: int

    @property
    def is_tensor(self) -> bool:
        """It has a digest."""
        return self.kind in ("entry", "leaf")


@dataclass(frozen=True, eq=False)
class Layout:
    """The names of a part in the order of its columns, each with its form."""

    forms: Mapping[str, Form]

    @cached_property
    def members(self) -> list[str]:
        """The names as a list, one object for all that it is compared with."""
        return list(self.forms)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names as a set that knows its hash."""
        return frozenset(self.forms)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names that have a digest, in the order of the digests."""
        return tuple(name for name, form in self.forms.items() if form.is_tensor)

    @cached_property
    def others(self) -> tuple[str, ...]:
        """The names that have none."""
        return tuple(name for name, form in self.forms.items() if not form.is_tensor)

    @cached_property
    def has_lists(self) -> bool:
        """Some leaf is a list of floats."""
        return any(form.kind == "floats" for form in self.forms.values())

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Lengths of the digests, the values and the packed floats of a part of this layout."""
        values = sum(form.kind == "value" for form in self.forms.values())
        floats = sum(form.count for form in self.forms.values())
        return len(self.tensors) * DIGEST_DIGITS, values, -(-8 * floats // 3) * 4


@dataclass(frozen=True, eq=False)
class Part(Mapping[str, JsonValue]):
    """The leaves of one part by name, each made when it is asked for."""

    layout: Layout
    digests: str
    plain: list[JsonValue]
    packed: str

    __hash__ = object.__hash__  # as a key it is itself, as a mapping it equals its like

    @cached_property
    def floats(self) -> tuple[float, ...]:
        """All floats of the part, one leaf after another."""
        content = base64.b64decode(self.packed, validate=True)
        return struct.unpack(f"<{len(content) // 8}d", content)

    def differing(self, other: Part) -> list[str]:
        """The names that both have and under which their values are not the same.

        Tensors at different places are left out: they are different parts of something.
        """
        equal = self.layout is other.layout and self.digests == other.digests
        if equal and self.plain == other.plain and self.packed == other.packed:
            return []
        tensors, others = _comparable(self.layout, other.layout)
        found = [name for name in others if self[name] != other[name]]
        if equal:
            return found
        return [name for name in tensors if self._digest(name) != other._digest(name)] + found

    def __getitem__(self, name: str) -> JsonValue:
        form = self.layout.forms[name]
        if form.kind == "value":
            return self.plain[form.at]
        numbers = list(self.floats[form.float_at : form.float_at + form.count])
        if form.kind == "floats":
            return numbers
        entry = [*form.head, self._digest(name)]
        if form.kind == "entry":
            return entry
        return {"entry": entry, "projection": numbers} if form.count else {"entry": entry}

    def _digest(self, name: str) -> str:
        begin = self.layout.forms[name].at * DIGEST_DIGITS
        return self.digests[begin : begin + DIGEST_DIGITS]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.forms)

    def __len__(self) -> int:
        return len(self.layout.forms)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.forms

    def keys(self) -> KeysView[str]:
        """The names; set operations on them are those of a dict."""
        return self.layout.forms.keys()


class Reader:
    """The layouts and parts of one fact file, in the order of its lines."""

    def __init__(self) -> None:
        self._layouts: dict[str, Layout] = {}
        self._parts: dict[str, Part] = {}

    def keep_layout(self, rest: bytes) -> None:
        """Remember the layout that a line records after its head, to its closing brace.

        Raises ValueError when it is not one.
        """
        head, names, content = rest.partition(b'"names":')
        _, _, key = head.rstrip(b'",').rpartition(b'"id":"')
        self._layouts[key.decode()] = _layout(names + content)

    def resolved(self, kind: str, rest: bytes) -> dict[str, JsonValue]:
        """The data of a fact from the rest of its line, to its closing brace, with mappings in
        place of columns.

        Raises KeyError when a layout or part that it names was lost, ValueError when it is not JSON
        or columns do not fit their layout: such a fact is as unreadable as a torn line.
        """
        again = kind in COMMON_KINDS and len(rest) <= _LONG_LINE_BYTES
        line = (_line if again else _line.__wrapped__)(kind, rest)
        if not line.layouts and not line.parts:
            return line.data
        rests_on = (
            *[self._layouts[layout] for layout in line.layouts],
            *[self._parts[part] for part in line.parts],
        )
        if rests_on not in line.made:
            line.made[rests_on] = self._made(kind, line.data)
        data, parts = line.made[rests_on]
        self._parts.update(parts)
        return data

    def _made(
        self, kind: str, data: dict[str, JsonValue]
    ) -> tuple[dict[str, JsonValue], dict[str, Part]]:
        """The data with its parts, and those parts that it is the first to tell, by their key."""
        made = dict(data)
        told = {}
        for name in _columns_in(kind, data):
            made[name] = self._part(*data[name])
            if len(data[name]) > 2:
                told[data[name][1]] = made[name]
        if "groups" in data:
            made["groups"] = [[self._group(g) for g in groups] for groups in data["groups"]]
        return made, told

    def _part(self, layout_id: str, key: str, *content: JsonValue) -> Part:
        if not content:
            return self._parts[key]
        digests, values, packed = content
        layout = self._layouts[layout_id]
        if (len(digests), len(values), len(packed)) != layout.sizes:
            raise ValueError("columns of another layout")
        return Part(layout, digests, values, packed)

    def _group(self, group: dict[str, JsonValue]) -> dict[str, JsonValue]:
        members = group["members"]
        named = self._layouts[members].members if isinstance(members, str) else members
        return {**group, "members": named}


@dataclass(frozen=True, eq=False)
class _Line:
    """The data of a fact, the layouts and earlier parts that it names, and what they made of it."""

    data: dict[str, JsonValue]
    layouts: tuple[str, ...]
    parts: tuple[str, ...]
    made: dict[tuple[object, ...], tuple[dict[str, JsonValue], dict[str, Part]]]


@lru_cache(maxsize=_LINES)
def _line(kind: str, rest: bytes) -> _Line:
    """What is equal byte for byte is parsed once: a state that came back whole, in every launch."""
    data = parsed(b"{" + rest)
    columns = [data[name] for name in _columns_in(kind, data)]
    layouts = [column[0] for column in columns if len(column) > 2]
    layouts += [g["members"] for groups in data.get("groups", ()) for g in groups]
    earlier = tuple(column[1] for column in columns if len(column) == 2)
    return _Line(data, tuple(x for x in layouts if isinstance(x, str)), earlier, {})


def _columns_in(kind: str, data: dict[str, JsonValue]) -> list[str]:
    return [name for name in WITH_COLUMNS.get(kind, ()) if isinstance(data.get(name), list)]


def parsed(line: bytes) -> JsonValue:
    """`json.loads`, five times as fast for what JSON allows; NaN and lone surrogates it does not.

    Raises ValueError.
    """
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return json.loads(line)


@lru_cache(maxsize=_LAYOUTS)
def _comparable(one: Layout, other: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensors that both have at one place, and the other leaves that both have."""
    both = [name for name in one.forms if name in other.forms]
    pairs = [(name, one.forms[name], other.forms[name]) for name in both]
    return (
        tuple(n for n, a, b in pairs if a.is_tensor and b.is_tensor and a.head[2:] == b.head[2:]),
        tuple(n for n, a, b in pairs if not a.is_tensor and not b.is_tensor),
    )


@lru_cache(maxsize=_LAYOUTS)
def _layout(content: bytes) -> Layout:
    found = msgspec.json.decode(b"{" + content, type=_Layout)
    forms: dict[str, Form] = {}
    at = {"digest": 0, "plain": 0, "float": 0}
    if not found.forms:
        return Layout(dict.fromkeys(found.names, Form("value", [], 0, 0, 0)))
    for name, number in zip(found.names, found.form_of, strict=True):
        kind, *rest = found.forms[number]
        column = {"value": "plain", "floats": "float"}.get(kind, "digest")
        count = int(rest[-1]) if kind == "floats" or len(rest) == 5 else 0
        forms[name] = Form(kind, rest[:4], at[column], at["float"], count)
        at[column] += column != "float"
        at["float"] += count
    return Layout(forms)


class _Layout(msgspec.Struct):
    names: list[str]
    forms: list[list[JsonValue]]
    form_of: list[int]
