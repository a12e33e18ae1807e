"""Read back the fact files of a launch: one file a rank, one line a fact, torn lines passed over.

In order: try the moulds of files of that name that were read last; where none fits, take the file
apart line by line, read every line, and keep what was found as a mould. A thousand cells of 64
ranks are three million lines, and jobs that repeat themselves differ in times and paths alone. So a
mould is what a file says besides those with what it means; a file that fits it is read by its
digest, and only its own times, paths and lines of other kinds are read anew.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress, repeat
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ckptdrill import columns
from ckptdrill.model import Fact, JsonValue, LaunchRecord
from ckptdrill.store import RunFolder, read_json

_NUMBER = rb"(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
# Kind, time, rank, step, the time that it took and the path that it names; the rest follows.
_HEAD = re.compile(
    rb'\{"fact":"(\w+)","t":' + _NUMBER + rb',"rank":(\d+),"step":(\d+)'
    rb'(?:,"took_s":' + _NUMBER + rb')?(?:,"path":"([^"\\]*)")?,?'
)
_GROUPS = 1 + _HEAD.groups
_END = b"}\n"  # of every line, and of its rest
_LAYOUT = b"layout"
_COMMON = frozenset((_LAYOUT, *(kind.encode() for kind in columns.COMMON)))
_NAMES, _MOULDS = 256, 4  # kept: so many moulds for each of so many names of files
_LARGE_FILE_BYTES = 256 * 1024  # those of large models would fill the memory
_UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
_Data = dict[str, JsonValue]


def read_launch(run: RunFolder, launch_id: str, world_size: int) -> LaunchRecord:
    """All facts of one launch, rank by rank, in file order."""
    folder = run.launch(launch_id)
    facts: list[Fact] = []
    for rank in range(world_size):
        name = f"rank{rank}.jsonl"
        facts += read_facts(folder / name, f"launches/{launch_id}/{name}")
    exit_file = folder / "exit.json"
    ended = read_json(exit_file) if exit_file.exists() else None
    return LaunchRecord(launch_id, tuple(facts), ended, world_size)


def read_facts(path: Path, shown: str) -> list[Fact]:
    """The facts of one rank's file; torn lines, and facts that rest on one, are left out. `shown`
    is the path by which verdicts cite them.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            content = stream.readall()
    except FileNotFoundError:
        return []
    known = _moulds(path.name)
    for mould in known:
        own = mould.own_of(content)
        if own is not None:
            return mould.facts(own, shown)
    lines = _taken_apart(content)
    mould, own = _mould_of(lines or _line_by_line(content))
    if lines and len(content) <= _LARGE_FILE_BYTES:
        known.appendleft(mould)
    return mould.facts(own, shown)


@lru_cache(maxsize=_NAMES)
def _moulds(_name: str) -> deque[_Mould]:
    """The moulds of the files of one name, the last made first."""
    return deque(maxlen=_MOULDS)


# ------------------------------------------------------------------ line by line


class _Line(NamedTuple):
    """A readable line: its head, and the rest with the closing brace and the newline."""

    number: int
    kind: bytes
    t: bytes
    rank: bytes
    step: bytes
    took_s: bytes | None
    path: bytes | None
    rest: bytes

    @property
    def tail(self) -> bytes:
        """The rest as it follows the head: with a comma, where there is more than the brace."""
        return self.rest if self.rest == _END else b"," + self.rest


def _taken_apart(content: bytes) -> list[_Line]:
    """The lines of a file that is as the observer writes it; none of any other."""
    parts = _HEAD.split(content)
    rests = parts[_GROUPS::_GROUPS]
    if parts[0] or content.count(b"\n") != len(rests) or not all(r.endswith(_END) for r in rests):
        return []
    numbers = range(1, len(rests) + 1)
    return list(map(_Line, numbers, *(parts[at::_GROUPS] for at in range(1, 1 + _GROUPS))))


def _line_by_line(content: bytes) -> list[_Line]:
    """The readable lines of a file that was cut off, or written by somebody else."""
    found = (_line(number, line) for number, line in enumerate(content.split(b"\n"), 1))
    return [line for line in found if line is not None]


def _line(number: int, line: bytes) -> _Line | None:
    """One line, whose keys may stand in another order; None when it is no fact."""
    try:
        value = columns.parsed(line)
        kind = value.pop("fact", None)
        t = b"%r" % float(value.pop("t", 0))
        rank, step = (b"%d" % value.pop(name, 0) for name in ("rank", "step"))
    except (*_UNREADABLE, AttributeError):
        return None
    if not isinstance(kind, str):
        return None
    rest = json.dumps(value, separators=(",", ":")).encode()[1:] + b"\n"
    return _Line(number, kind.encode(), t, rank, step, None, None, rest)


# ------------------------------------------------------------------ moulds

_Own = list[Any]
_Places = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class _Mould:
    """A file line by line, and where what is its own stands: times, paths, and the rest of lines of
    other kinds or of what rests on those.

    `data` is None for the last, which are read for every file, and for layouts, which are no facts.
    `took_s`, `paths` and `rests` have pairs: the place of a line, and the place of its content in
    the list of all that is a file's own, as `times` has for every line.
    """

    lines: Sequence[_Line]
    data: Sequence[_Data | None]
    reader: columns.Reader  # has read what is common
    times: Sequence[int]
    took_s: _Places
    paths: _Places
    rests: _Places

    def facts(self, own: _Own, shown: str) -> list[Fact]:
        """The facts of a file with this of its own."""
        data = list(self.data)
        if self.rests:
            reader = self.reader.copy()
            for place, at in self.rests:
                data[place] = _read(reader, self.lines[place].kind, own[at].lstrip(b","))
        for name, places in (("path", self.paths), ("took_s", self.took_s)):
            for place, at in places:
                said = data[place]
                data[place] = None if said is None else {name: own[at], **said}
        times = map(own.__getitem__, self.times)
        kinds, ranks, steps, numbers = self._heads
        facts = map(Fact, kinds, ranks, steps, times, data, repeat(shown), numbers)
        return list(compress(facts, [said is not None for said in data]))

    @cached_property
    def _heads(self) -> tuple[Sequence[str], Sequence[int], Sequence[int], Sequence[int]]:
        """Kind, rank, step and number of every line."""
        return (
            [line.kind.decode() for line in self.lines],
            [int(line.rank) for line in self.lines],
            [int(line.step) for line in self.lines],
            [line.number for line in self.lines],
        )

    def own_of(self, content: bytes) -> _Own | None:
        """What a file has of its own, None when it is not of this mould."""
        stretches, digest = self._stretches
        own: _Own = []
        common = []
        at = 0
        try:
            for length, end, value in stretches:
                begin = at + length
                common.append(content[at:begin])
                at = content.index(end, begin)
                own.append(value(content[begin:at]))
        except ValueError:
            return None
        common.append(content[at:])
        return own if _digest(common) == digest else None

    @cached_property
    def _stretches(self) -> tuple[Sequence[_Stretch], bytes]:
        """What every such file has up to each place of its own, and the digest of all that."""
        found: list[_Stretch] = []
        common: list[bytes] = []
        before = b""

        def own(end: bytes) -> None:
            common.append(before)
            found.append((len(before), end, _VALUES[end]))

        own_rests = {place for place, _ in self.rests}
        for place, line in enumerate(self.lines):
            before += b'{"fact":"%b","t":' % line.kind
            own(b",")
            before = b',"rank":%b,"step":%b' % (line.rank, line.step)
            if line.took_s is not None:
                end = b"}" if line.path is None and line.rest == _END else b","
                before += b',"took_s":'
                own(end)
                before = b""
            if line.path is not None:
                before += b',"path":"'
                own(b'"')
                before = b'"'
            if place in own_rests:
                own(b"\n")
                before = b"\n"
            else:
                before += line.tail
        return found, _digest([*common, before])


# The length of what is common, the byte that ends what follows, and what that means.
_Stretch = tuple[int, bytes, Callable[[bytes], Any]]


def _digest(stretches: Iterable[bytes]) -> bytes:
    """Of stretches whose lengths are known. Compared instead of them, since what a file is compared
    with is no longer in the processor's caches: that takes five times as long.
    """
    return xxhash.xxh3_128_digest(b"".join(stretches))


def _path(text: bytes) -> str:
    """Raises ValueError for a path with escapes, which may end elsewhere."""
    if b"\\" in text:
        raise ValueError("a path with escapes")
    return text.decode()


# What is a file's own, by the byte that ends it.
_VALUES: Mapping[bytes, Callable[[bytes], Any]] = {
    b",": float,
    b"}": float,
    b'"': _path,
    b"\n": bytes,
}


def _mould_of(lines: Sequence[_Line]) -> tuple[_Mould, _Own]:
    """The mould of a file, and what the file has of its own."""
    reader = columns.Reader()
    own: _Own = []
    data: list[_Data | None] = []
    times: list[int] = []
    took_s: list[tuple[int, int]] = []
    paths: list[tuple[int, int]] = []
    rests: list[tuple[int, int]] = []
    for place, line in enumerate(lines):
        said = _read(reader, line.kind, line.rest) if line.kind in _COMMON else None
        data.append(said)
        times.append(len(own))
        own.append(float(line.t))
        if line.took_s is not None:
            took_s.append((place, len(own)))
            own.append(float(line.took_s))
        if line.path is not None:
            paths.append((place, len(own)))
            own.append(line.path.decode(errors="replace"))
        if said is None and line.kind != _LAYOUT:
            rests.append((place, len(own)))
            own.append(line.tail.rstrip(b"\n"))
    return _Mould(lines, data, reader, times, took_s, paths, rests), own


def _read(reader: columns.Reader, kind: bytes, rest: bytes) -> _Data | None:
    """What a line says; None for a layout, which the reader keeps, and for what is not readable
    here.
    """
    try:
        if kind != _LAYOUT:
            return reader.resolved(kind.decode(), rest)
        reader.keep_layout(rest)
    except _UNREADABLE:
        pass
    return None
