"""YAML to plain values that still know their line and column, so that every error can name them.

In order: size and encoding are checked; the parser's events (not its objects: nothing is ever
constructed) are turned into dicts, lists and scalars; the mark of every key and value is kept by
location. What can be told and passed over (a duplicate key, a refused tag) is collected in
`Document.problems`; what ends the reading is raised at once.

Scalars follow the YAML 1.2 core rules: `1e-3` is a number, `on` and `no` are text, `010` is ten and
`1:30` is text. Keys are always text, as written. Depth, number of values (aliases counted expanded)
and size are limited, so that no file can exhaust the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from ckptdrill.errors import UserError
from ckptdrill.model import JsonValue

SIZE_LIMIT_BYTES = 1 << 20
DEPTH_LIMIT = 20
VALUES_LIMIT = 20_000
PROBLEMS_SHOWN = 10

Location = tuple[str | int, ...]

_INTEGER = re.compile(r"[-+]?[0-9]{1,30}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,4})?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_WORD_SPELLINGS = {s: v for w, v in _WORDS.items() for s in (w, w.capitalize(), w.upper())}
_UNSPEAKABLE = re.compile("[\0\ud800-\udfff]")
_BARE_PLACEHOLDER = re.compile(r"(^|[\s,:\[-])\{[A-Za-z_]+\}")
_TEXT_TAG = "tag:yaml.org,2002:str"


@dataclass(frozen=True, order=True)
class Mark:
    """A place in the file; both count from 1, as editors do."""

    line: int
    column: int


@dataclass(frozen=True)
class Problem:
    """One thing to mend: where it stands, which key it is about (may be empty), what is wrong."""

    mark: Mark
    key: str
    message: str

    def text(self, path: Path) -> str:
        """`matrix.yaml:12:7: job.saves: …`, which editors and terminals make clickable."""
        key = f"{_clipped(self.key, 120)}: " if self.key else ""
        message = _clipped(self.message, 800)
        return f"{path}:{self.mark.line}:{self.mark.column}: {key}{message}"


@dataclass(frozen=True)
class Document:
    """The values of a file, and where each of them stands."""

    data: JsonValue
    key_marks: Mapping[Location, Mark]
    value_marks: Mapping[Location, Mark]
    texts: Mapping[Location, str]
    problems: tuple[Problem, ...]

    def mark(self, location: Location, *, of_key: bool = False) -> Mark:
        """Where `location` stands; parts of it that the file does not have are passed over.

        A missing key is thus marked at the mapping that lacks it, a part of an alias at the alias,
        a key that a short form (one word for a mapping) implies at that word.
        """
        here: Location = ()
        for part in location:
            if (*here, part) in self.value_marks:
                here = (*here, part)
        exact = here[-1:] == location[-1:]
        if of_key if exact else here not in self.texts:
            return self.key_marks.get(here, self.value_marks[here])
        return self.value_marks[here]

    def text(self, location: Location, value: JsonValue) -> JsonValue:
        """A scalar as it was written (`1.10`, not 1.1); None, lists and mappings as they are."""
        if value is None or isinstance(value, (str, list, dict)):
            return value
        return self.texts.get(location, str(value).lower())


def complain(path: Path, problems: Sequence[Problem]) -> None:
    """Raise one UserError that lists `problems` in file order, ten at most; nothing when empty."""
    if not problems:
        return
    lines = list(dict.fromkeys(p.text(path) for p in sorted(problems, key=lambda p: p.mark)))
    shown = lines[:PROBLEMS_SHOWN]
    if len(lines) > len(shown):
        shown.append(f"… and {len(lines) - len(shown)} more")
    raise UserError("\n".join(shown), hint="`ckptdrill schema` prints the whole format")


def dotted(location: Location) -> str:
    """`matrix[0].targets[1]`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def read(text: bytes, path: Path) -> Document:
    """The one YAML document in `text`.

    Raises UserError when it is too large, not UTF-8, not YAML, or beyond the limits above.
    """
    builder = _Builder()
    try:
        content = _decode(text)
        data = builder.document(_events(content))
    except _StopError as stop:
        complain(path, [*builder.problems, Problem(stop.mark, stop.key, stop.message)])
        raise  # complain() always raises for a problem
    return Document(
        data, builder.key_marks, builder.value_marks, builder.texts, tuple(builder.problems)
    )


class _StopError(Exception):
    """Reading cannot go on."""

    def __init__(self, mark: Mark, message: str, location: Location = ()) -> None:
        super().__init__(message)
        self.mark = mark
        self.message = message
        self.key = dotted(location)


def _decode(text: bytes) -> str:
    if len(text) > SIZE_LIMIT_BYTES:
        message = f"the file has more than {SIZE_LIMIT_BYTES} bytes; allowed: up to 1 MiB"
        raise _StopError(Mark(1, 1), message)
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = text[: error.start]
        mark = Mark(before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        found = f"byte 0x{text[error.start]:02x}"
        raise _StopError(mark, f"not UTF-8: found {found}; allowed: text saved as UTF-8") from error


def _events(content: str) -> Iterator[Any]:
    """The parser's events; whatever it raises becomes a `_StopError` in words."""
    try:
        yield from yaml.parse(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _syntax_stop(error, content) from error
    except yaml.reader.ReaderError as error:
        before = content[: error.position]
        mark = Mark(before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise _StopError(mark, f"not YAML: character {error.character!r} is not allowed") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # An escape beyond Unicode ("\UFFFFFFFF") or an endless number reaches us unmarked.
        raise _StopError(Mark(1, 1), f"not YAML: {error}") from error


def _syntax_stop(error: yaml.MarkedYAMLError, content: str) -> _StopError:
    place = error.problem_mark or error.context_mark
    if place is None:
        return _StopError(Mark(1, 1), f"not YAML: {error.problem}")
    lines = content.split("\n")
    line = lines[place.line] if place.line < len(lines) else ""
    mark = Mark(place.line + 1, place.column + 1)
    if "\t" in line[: place.column + 1]:
        return _StopError(mark, "not YAML: found a tab; allowed: spaces only")
    if _BARE_PLACEHOLDER.search(line):
        advice = 'a value that begins with a placeholder needs quotes, as "{out}/step-{step}"'
        return _StopError(mark, f"not YAML: {advice}")
    context = f" {error.context}" if error.context else ""
    return _StopError(mark, f"not YAML: {error.problem}{context}")


@dataclass
class _Builder:
    """Folds events into values, and notes on the way where each of them stood."""

    key_marks: dict[Location, Mark] = field(default_factory=dict)
    value_marks: dict[Location, Mark] = field(default_factory=dict)
    texts: dict[Location, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    anchors: dict[str, tuple[JsonValue, int]] = field(default_factory=dict)
    values: int = 0

    def document(self, events: Iterator[Any]) -> JsonValue:
        """The value of the only document."""
        starts = (event for event in events if isinstance(event, DocumentStartEvent))
        if next(starts, None) is None:
            raise _StopError(
                Mark(1, 1), "the file is empty; allowed: a mapping, see the quickstart"
            )
        data = self.value(next(events), events, ())
        second = next(starts, None)
        if second is not None:
            raise _StopError(_mark(second), "found a second document; allowed: one for each file")
        return data

    def value(self, event: Any, events: Iterator[Any], at: Location) -> JsonValue:
        """The value that begins with `event`."""
        self.value_marks[at] = _mark(event)
        self._count(event, 1, at)
        if isinstance(event, AliasEvent):
            return self._alias(event, at)
        before = self.values
        data = self._node(event, events, at)
        if event.anchor is not None:
            self.anchors[event.anchor] = (data, 1 + self.values - before)
        return data

    def _node(self, event: Any, events: Iterator[Any], at: Location) -> JsonValue:
        if isinstance(event, ScalarEvent):
            return self._scalar(event, at)
        if event.tag is not None:
            self._refuse_tag(event, at)
        if len(at) >= DEPTH_LIMIT:
            message = f"nested too deeply; allowed: {DEPTH_LIMIT} levels"
            raise _StopError(_mark(event), message)
        if isinstance(event, SequenceStartEvent):
            return self._sequence(events, at)
        return self._mapping(events, at)

    def _sequence(self, events: Iterator[Any], at: Location) -> list[JsonValue]:
        items: list[JsonValue] = []
        while not isinstance(event := next(events), SequenceEndEvent):
            items.append(self.value(event, events, (*at, len(items))))
        return items

    def _mapping(self, events: Iterator[Any], at: Location) -> dict[str, JsonValue]:
        own: dict[str, JsonValue] = {}
        merged: dict[str, JsonValue] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            key = self._key(event, at)
            inside = (*at, key)
            if key == "<<" and event.style is None:
                self._merge(self.value(next(events), events, inside), merged, inside)
                continue
            if key in own:
                first = self.key_marks[inside].line
                self._note(event, inside, f"duplicate key; it stands in line {first} already")
            self.key_marks.setdefault(inside, _mark(event))
            own[key] = self.value(next(events), events, inside)
        return {**merged, **own}

    def _key(self, event: Any, at: Location) -> str:
        if not isinstance(event, ScalarEvent):
            found = "an alias" if isinstance(event, AliasEvent) else "a list or a mapping"
            advice = '; a placeholder needs quotes, as "{out}"'
            raise _StopError(_mark(event), f"found {found} as a key; allowed: text{advice}", at)
        self._speakable(event, at)
        return event.value

    def _merge(self, value: JsonValue, merged: dict[str, JsonValue], at: Location) -> None:
        """`<<: *base`; the first of several wins, as YAML's merge says."""
        for base in value if isinstance(value, list) else [value]:
            if not isinstance(base, dict):
                mark = self.value_marks[at]
                message = "found a value that is no mapping; allowed: <<: *anchor-of-a-mapping"
                self.problems.append(Problem(mark, dotted(at), message))
                continue
            for key in base:
                merged.setdefault(key, base[key])
                self.key_marks.setdefault((*at[:-1], key), self.value_marks[at])
                self.value_marks.setdefault((*at[:-1], key), self.value_marks[at])

    def _alias(self, event: AliasEvent, at: Location) -> JsonValue:
        if event.anchor not in self.anchors:
            known = ", ".join(f"*{name}" for name in self.anchors) or "none is defined so far"
            message = f"found the unknown anchor *{event.anchor}; allowed: {known}"
            raise _StopError(_mark(event), message, at)
        data, size = self.anchors[event.anchor]
        self._count(event, size, at)
        return data

    def _scalar(self, event: ScalarEvent, at: Location) -> JsonValue:
        self._speakable(event, at)
        self.texts[at] = event.value
        if event.tag not in (None, "!", _TEXT_TAG):
            self._refuse_tag(event, at)
        if event.style is not None or event.tag is not None:
            return event.value
        return _plain(event.value)

    def _speakable(self, event: ScalarEvent, at: Location) -> None:
        if _UNSPEAKABLE.search(event.value):
            # Neither a process nor a terminal nor a JSON file could take it.
            message = "found a NUL or half a surrogate pair; allowed: ordinary text"
            raise _StopError(_mark(event), message, at)

    def _refuse_tag(self, event: Any, at: Location) -> None:
        message = f"found the tag {event.tag!r}; allowed: no tags, nothing is ever constructed"
        self._note(event, at, message)

    def _note(self, event: NodeEvent, at: Location, message: str) -> None:
        self.problems.append(Problem(_mark(event), dotted(at), message))

    def _count(self, event: NodeEvent, number: int, at: Location) -> None:
        self.values += number
        if self.values > VALUES_LIMIT:
            message = f"too many values, aliases counted; allowed: {VALUES_LIMIT} in a file"
            raise _StopError(_mark(event), message, at[:1])


def _plain(text: str) -> JsonValue:
    """A scalar without quotes, by the YAML 1.2 core rules; `.inf` and `.nan` stay text."""
    if text in _WORD_SPELLINGS:
        return _WORD_SPELLINGS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _clipped(text: str, limit: int) -> str:
    """`text` on one line, cut, and without what could confuse a terminal or fail to be encoded."""
    cut = text if len(text) <= limit else f"{text[:limit]}…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def _mark(event: Any) -> Mark:
    return Mark(event.start_mark.line + 1, event.start_mark.column + 1)
