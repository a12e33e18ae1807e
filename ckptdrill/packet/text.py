"""Small pieces of wording that the page, the Markdown and the view share. Pure.

What a job printed or named is shown here, and it may hold anything. Escaping for HTML is the
template's work; this module removes what survives escaping and still misleads a reader: control
characters, and the invisible ones that reverse or hide text.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TypeGuard

from ckptdrill.model import JsonValue

# Cc control, Cf format (bidirectional overrides, zero width), Cs lone surrogate, line separators.
_MISLEADING = ("Cc", "Cf", "Cs", "Zl", "Zp")
_LINKABLE = re.compile(r"((?:launches|damages|cells)/[A-Za-z0-9][\w.+=/-]*)(?::\d+)?", re.ASCII)


def visible(value: object) -> str:
    """`value` as text in which every character can be seen; others become their code, as u202e."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character in "\n\t":
        return " "
    if unicodedata.category(character) in _MISLEADING:
        return f"\\u{ord(character):04x}"
    return character


def link_target(ref: str) -> str | None:
    """The file of a fact ref such as `launches/x/rank0.jsonl:12`, None if it is not one of ours.

    Only paths inside the run folder made of harmless characters are ever linked, so that a name
    which a job chose cannot become an address.
    """
    found = _LINKABLE.fullmatch(ref)
    if found is None or ".." in ref or "//" in ref:
        return None
    return found[1]


def number(value: JsonValue) -> str:
    """A measured number for people, four digits; `–` where there is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else visible(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def is_number(value: JsonValue) -> TypeGuard[float]:
    """True for a finite int or float: what can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def seconds(value: float) -> str:
    """A duration for people: `0.42 s`, `12.3 s`, `4 min 05 s`, `2 h 03 min`."""
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest_s = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def between_s(started_utc: str | None, ended_utc: str | None) -> float | None:
    """Seconds between two ISO 8601 times, None where either is missing or not a time, or where the
    clock has been put back in between.
    """
    try:
        started = datetime.fromisoformat(_zoned(started_utc or ""))
        ended = datetime.fromisoformat(_zoned(ended_utc or ""))
        between = (ended - started).total_seconds()
        return between if between >= 0 else None
    except (TypeError, ValueError):
        return None


def _zoned(utc: str) -> str:
    """Python 3.10 does not read the `Z` that everybody writes."""
    return utc.removesuffix("Z") + "+00:00" if utc.endswith("Z") else utc


def flatten(value: JsonValue, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every leaf of a JSON value; lists of plain values stay on one line."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}[{index}]")
    elif isinstance(value, list):
        yield prefix, ", ".join(plain(item) for item in value)
    else:
        yield prefix, plain(value)


def plain(value: JsonValue) -> str:
    """A JSON leaf as people write it: yes, no, –, a number or the text itself."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value)


def recorded(value: JsonValue) -> str:
    """A recorded value as text, empty where there is none."""
    return "" if value is None else str(value)


def counted(count: int, noun: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
