"""Write many named leaves as columns: what never changes once, then only what does.

A state of ten thousand tensors told leaf by leaf takes megabytes at every sample, nearly all of it
names and shapes. So a part of a fact (weights, optimizer state, saved leaves) stands as
`[layout, key, digests, values, floats]`. Its layout is a fact of its own, written once: the names,
and which form and place each has. Digests stand one after another in 32 hex digits each, plain
values in a list, floats (projections) as float64 in base64. The key is a digest of all that, and a
part that is what an earlier one of this file was is `[layout, key]` alone. Both are found by
content and never by position, so that a torn line loses itself and nothing else.
ckptdrill/columns.py reads them back.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from typing import Any, Callable

_DIGEST_DIGITS = 32


class Columns:
    """The columns of one fact file; `write` is its `Recorder.record`."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._written: set[str] = set()

    def of(self, leaves: dict[str, Any]) -> Any:
        """`leaves` as columns, after their layout if that is new; an empty part stays `{}`."""
        if not leaves:
            return {}
        forms: dict[str, int] = {}
        digests: list[str] = []
        values: list[Any] = []
        floats: list[float] = []
        form_of: list[int] = []
        listed: list[Any] = []
        for value in leaves.values():
            form, entry, numbers = _taken_apart(value)
            if entry is not None:
                digests.append(entry[4])
            elif numbers is None:
                values.append(value)
            floats += numbers or ()
            number = forms.setdefault(repr(form), len(forms))
            if number == len(listed):
                listed.append(form)
            form_of.append(number)
        layout = self.layout(list(leaves), listed, form_of)
        packed = base64.b64encode(struct.pack(f"<{len(floats)}d", *floats)).decode("ascii")
        return self._once(layout, ["".join(digests), values, packed])

    def names(self, names: list[str]) -> str:
        """The id of a layout that is a list of names alone."""
        return self.layout(names, [], [])

    def layout(self, names: list[str], forms: list[Any], form_of: list[int]) -> str:
        """The id of a layout, recorded before its first use."""
        content = {"names": names, "forms": forms, "form_of": form_of}
        key = _key(content)
        if key not in self._written:
            self._write("layout", id=key, **content)
            self._written.add(key)
        return key

    def _once(self, layout: str, content: list[Any]) -> list[Any]:
        key = _key([layout, *content])
        if key in self._written:
            return [layout, key]
        self._written.add(key)
        return [layout, key, *content]


def _taken_apart(value: Any) -> tuple[list[Any], Any, Any]:
    """The form of a leaf, its fingerprint entry and its floats, where it has them."""
    if _is_entry(value):
        return ["entry", *value[:4]], value, None
    if _is_floats(value):
        return ["floats", len(value)], None, value
    if isinstance(value, dict) and _is_entry(value.get("entry")):
        if len(value) == 1:
            return ["leaf", *value["entry"][:4]], value["entry"], None
        if value.keys() == {"entry", "projection"} and _is_floats(value["projection"]):
            numbers = value["projection"]
            return ["leaf", *value["entry"][:4], len(numbers)], value["entry"], numbers
    return ["value"], None, None


def _is_entry(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) == 5
        and type(value[0]) is str
        and all(type(part) is list for part in value[1:4])
        and type(value[4]) is str
        and len(value[4]) == _DIGEST_DIGITS
    )


def _is_floats(value: Any) -> bool:
    return type(value) is list and bool(value) and all(type(number) is float for number in value)


def _key(content: Any) -> str:
    text = json.dumps(content, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
