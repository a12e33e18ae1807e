"""Read back the fact files of a launch: one file a rank, one line a fact, torn lines passed over.

In order: try the moulds of files of that name that were read last; where none fits, take the file
apart line by line, read the lines of common kinds, and keep what was found as a mould. A thousand
cells of 64 ranks are four million lines, and jobs that repeat themselves differ in times, paths and
lines of their own alone. So a mould is what a file says besides those with what it means. A file
that fits it is read by its digest and has the facts of the mould; launches of which every file has
the mould of another's have them in common, and what follows from them (`Common`). Small facts that
turn out to vary from launch to launch are each file's own from then on. What is a file's own is
read when it is asked for.
"""

from __future__ import annotations

import json
import operator
import os
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import xxhash

from ckptdrill import columns
from ckptdrill.model import COMMON_KINDS, Common, Fact, JsonValue, LaunchRecord
from ckptdrill.store import RunFolder, read_json

_NUMBER = rb"(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
_IN_NUMBERS = b"0123456789+-.eE"
# Of a line as the observer writes it: kind, time, rank, step, the time that it took and the path
# that it names; the rest follows.
_HEAD = re.compile(
    rb'\{"fact":"(\w+)","t":' + _NUMBER + rb',"rank":(\d+),"step":(\d+)'
    rb'(?:,"took_s":' + _NUMBER + rb')?(?:,"path":"([^"\\]*)")?,?'
)
_LAYOUT = "layout"
_NAMES, _MOULDS, _COMMONS = 256, 4, 16  # kept: so many moulds for each of so many names of files
_LARGE_FILE_BYTES = 256 * 1024  # those of large models would fill the memory
# Those that can be read without what was told before them.
_SMALL_KINDS = COMMON_KINDS - columns.WITH_COLUMNS.keys()
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_Data = dict[str, JsonValue]


def read_launch(run: RunFolder, launch_id: str, world_size: int) -> LaunchRecord:
    """All facts of one launch of a run."""
    return read_folder(run.launch(launch_id), launch_id, world_size)


def read_folder(folder: Path, launch_id: str, world_size: int) -> LaunchRecord:
    """All facts in the folder of a launch. Torn lines, facts that rest on one, and facts of another
    rank than the file's are left out.
    """
    files = [_read(str(folder), rank) for rank in range(world_size)]
    exit_file = folder / "exit.json"
    return LaunchRecord(
        launch_id,
        _common(tuple(file.mould for file in files)),
        _OwnFacts(files),
        _Apart(files),
        read_json(exit_file) if exit_file.exists() else None,
        world_size,
    )


class _File(NamedTuple):
    """A file that was read: its mould, and what it has of its own, in the order of the mould."""

    mould: _Mould
    own: Sequence[bytes]


def _read(folder: str, rank: int) -> _File:
    name = f"rank{rank}.jsonl"
    content = _content(f"{folder}/{name}")
    known = _moulds(name)
    for mould in known:
        own = mould.own_of(content)
        if own is not None:
            return _File(mould, own)
    lines = _lines(content)
    loose = _varying(known, lines)
    mould = _mould_of([_as_own(line) if line.kind in loose else line for line in lines], rank)
    if mould.whole and len(content) <= _LARGE_FILE_BYTES:
        known.appendleft(mould)
    return _File(mould, list(chain.from_iterable(line.own for line in mould.lines)))


def _content(path: str) -> bytes:
    """A whole file, nothing of one that is not there. By the system's calls: a file object and a
    Path take several times as long.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    try:
        parts = []
        while part := os.read(descriptor, _LARGE_FILE_BYTES):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=_NAMES)
def _moulds(_name: str) -> deque[_Mould]:
    """The moulds of the files of one name, the last made first."""
    return deque(maxlen=_MOULDS)


@lru_cache(maxsize=_COMMONS)
def _common(moulds: tuple[_Mould, ...]) -> Common:
    """What the launches with these moulds have in common."""
    kinds = COMMON_KINDS.difference(*(mould.own_lines for mould in moulds))
    found: dict[str, list[Fact]] = {}
    for fact in (fact for mould in moulds for fact in mould.facts if fact.kind in kinds):
        found.setdefault(fact.kind, []).append(fact)
    last = {rank: mould.last_step for rank, mould in enumerate(moulds)}
    return Common(
        kinds,
        {kind: tuple(facts) for kind, facts in found.items()},
        {rank: step for rank, step in last.items() if step is not None},
    )


# ------------------------------------------------------------------ what is each launch's own


class _OwnFacts(Mapping[str, tuple[Fact, ...]]):
    """The facts of other kinds than the common ones, by kind; read when they are asked for."""

    def __init__(self, files: Sequence[_File]) -> None:
        self._files = files
        self._read: dict[str, tuple[Fact, ...]] = {}

    def __getitem__(self, kind: str) -> tuple[Fact, ...]:
        if kind not in self._read:
            ranks = enumerate(self._files)
            facts = (f for rank, (mould, own) in ranks for f in mould.facts_of(own, kind, rank))
            self._read[kind] = tuple(facts)
        return self._read[kind]

    def __iter__(self) -> Iterator[str]:
        return iter({kind: None for mould, _ in self._files for kind in mould.own_lines})

    def __len__(self) -> int:
        return len(tuple(iter(self)))


class _Apart:
    """Times, seconds and paths, read when they are asked for."""

    def __init__(self, files: Sequence[_File]) -> None:
        self._files = files

    def t(self, rank: int, line: int) -> float:
        mould, own = self._files[rank]
        return float(own[mould.own_at[line]].partition(b",")[0])

    def took_s(self, rank: int, line: int) -> float | None:
        mould, own = self._files[rank]
        return float(own[mould.own_at[line] + 1]) if mould.by_number[line].has_took_s else None

    def path(self, rank: int, line: int) -> str | None:
        mould, own = self._files[rank]
        told = mould.by_number[line]
        if not told.has_path:
            return None
        return own[mould.own_at[line] + 1 + told.has_took_s].decode(errors="replace")


# ------------------------------------------------------------------ line by line


class _Line(NamedTuple):
    """A readable line. `own` is what other files do not have in it, in the order in which it stands
    there: time, seconds and path, or everything from the time on in a line of another kind than the
    common ones. `rest` is what follows, to the closing brace.

    `as_written`: by the observer, so that the line can be told from other files' by its parts.
    """

    number: int
    kind: str
    is_common: bool
    own: Sequence[bytes]
    rank: int = 0
    step: int = 0
    has_took_s: bool = False
    has_path: bool = False
    rest: bytes = b""
    as_written: bool = True

    def says_the_same(self, other: _Line) -> bool:
        """Equal in all but what is each file's own."""
        mine, its = (line[4:] for line in (self, other))
        return mine == its


def _lines(content: bytes) -> list[_Line]:
    """The readable lines of a file, whether or not the last one is torn."""
    found = (_line(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line)
    return [line for line in found if line is not None]


def _line(number: int, line: bytes) -> _Line | None:
    """One line; None when it is no fact."""
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}"):
        return _by_another_hand(number, line)
    kind_, t, rank, step, took_s, path = head.groups()
    kind = kind_.decode()
    if not _is_common(kind):
        return _Line(number, kind, False, (line[head.start(2) :],))
    own = [text for text in (t, took_s, path) if text is not None]
    has = (took_s is not None, path is not None)
    return _Line(number, kind, True, own, int(rank), int(step), *has, line[head.end() :])


def _as_own(line: _Line) -> _Line:
    """A line as one of which other files have nothing but the kind."""
    named = ["t", *["took_s"] * line.has_took_s, *["path"] * line.has_path]
    own = dict(zip(named, line.own, strict=True))
    text = b'%b,"rank":%d,"step":%d' % (own["t"], line.rank, line.step)
    text += b',"took_s":%b' % own["took_s"] if line.has_took_s else b""
    text += b',"path":"%b"' % own["path"] if line.has_path else b""
    text += line.rest if line.rest == b"}" else b"," + line.rest
    return _Line(line.number, line.kind, False, (text,), as_written=line.as_written)


def _varying(known: Iterable[_Mould], lines: Sequence[_Line]) -> frozenset[str]:
    """The kinds of a few small facts by which a file differs from one that was read before it, and
    by nothing else: an unseeded generator, a counter that is a process id. In files of that name
    they are each file's own from now on.
    """
    for mould in known:
        pairs = list(zip(mould.lines, lines, strict=False))
        if len(mould.lines) != len(lines) or any(a.kind != b.kind for a, b in pairs):
            continue
        own = COMMON_KINDS.intersection(mould.own_lines)
        kinds = own.union(a.kind for a, b in pairs if a.is_common and not a.says_the_same(b))
        if _SMALL_KINDS.issuperset(kinds):
            return kinds
    return frozenset()


def _is_common(kind: str) -> bool:
    return kind == _LAYOUT or kind in COMMON_KINDS


def _by_another_hand(number: int, line: bytes) -> _Line | None:
    """A line whose keys stand in another order, or that is torn."""
    try:
        value = columns.parsed(line)
        kind = value.pop("fact", None)
        head = {name: value.pop(name, 0) for name in ("t", "rank", "step")}
        t = b"%r" % float(head["t"])
        rank, step = int(head["rank"]), int(head["step"])
    except _UNREADABLE:
        return None
    if not isinstance(kind, str):
        return None
    rest = json.dumps(value, separators=(",", ":")).encode()[1:]
    told = _Line(number, kind, True, (t,), rank, step, rest=rest, as_written=False)
    return told if _is_common(kind) else _as_own(told)


# ------------------------------------------------------------------ moulds


class _Stretches(NamedTuple):
    """What every file of a mould has up to each place of its own: the length of it, and the byte
    that ends what follows; and the digest of all of it.

    What is compared with has left the processor's caches since the last file, and takes longer to
    come back than to compare. So this is kept small.
    """

    lengths: array[int]
    ends: bytes
    digest: bytes


@dataclass(frozen=True, eq=False)
class _Mould:
    """A file line by line, and the facts of its common kinds.

    `whole`: every line is as the observer writes it and none was left out, so that other files can
    be held against it and have the same facts in the same lines.
    """

    lines: Sequence[_Line]
    facts: Sequence[Fact]
    whole: bool

    @cached_property
    def last_step(self) -> int | None:
        """The last step that a line of a common kind tells of."""
        return max((line.step for line in self.lines), default=None)

    @cached_property
    def own_lines(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """The lines of each kind that is a file's own: their numbers, and where they stand among
        all that is.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        for line in self.lines:
            if not line.is_common:
                found.setdefault(line.kind, []).append((line.number, self.own_at[line.number]))
        return found

    @cached_property
    def own_at(self) -> Mapping[int, int]:
        """Where what is a line's own begins among all that is the file's own, by its number."""
        begins = accumulate((len(line.own) for line in self.lines), initial=0)
        return {line.number: at for line, at in zip(self.lines, begins, strict=False)}

    @cached_property
    def by_number(self) -> Mapping[int, _Line]:
        """The lines by their number."""
        return {line.number: line for line in self.lines}

    def facts_of(self, own: Sequence[bytes], kind: str, rank: int) -> Iterator[Fact]:
        """The facts of one kind of the file of a rank that has this of its own."""
        for number, at in self.own_lines.get(kind, ()):
            fact = _own_fact(own[at], kind, number)
            if fact is not None and fact.rank == rank:
                yield fact
        if kind in COMMON_KINDS:
            yield from (fact for fact in self.facts if fact.kind == kind)

    def own_of(self, content: bytes) -> list[bytes] | None:
        """What a file has of its own, None when it is not of this mould."""
        stretches = self._stretches
        own: list[bytes] = []
        common, view = xxhash.xxh3_128(), memoryview(content)
        at = 0
        try:
            for length, end in zip(stretches.lengths, stretches.ends, strict=True):
                begin = at + length
                common.update(view[at:begin])
                at = content.index(end, begin)
                own.append(content[begin:at])
        except ValueError:
            return None
        common.update(view[at:])
        if common.digest() != stretches.digest:
            return None
        # What does not end where it should has something of the next line in it.
        numbers, paths = b"".join(self._numbers(own)), b"".join(self._paths(own))
        return None if numbers.translate(None, _IN_NUMBERS) or b"\\" in paths else own

    @cached_property
    def _stretches(self) -> _Stretches:
        lengths, ends, common = array("L"), bytearray(), xxhash.xxh3_128()
        before = b""

        def own(end: bytes) -> None:
            common.update(before)
            lengths.append(len(before))
            ends.extend(end)

        for line in self.lines:
            before += b'{"fact":"%b","t":' % line.kind.encode()
            if line.is_common:
                own(b",")
                before = b',"rank":%d,"step":%d' % (line.rank, line.step)
                bare = line.rest == b"}"  # nothing follows
                if line.has_took_s:
                    before += b',"took_s":'
                    own(b"}" if bare and not line.has_path else b",")
                    before = b""
                if line.has_path:
                    before += b',"path":"'
                    own(b'"')
                    before = b'"'
                before += (b"" if bare else b",") + line.rest + b"\n"
            else:
                own(b"\n")
                before = b"\n"
        common.update(before)
        return _Stretches(lengths, bytes(ends), common.digest())

    @cached_property
    def _numbers(self) -> _Chosen:
        """The numbers among what is a file's own."""
        common = [(self.own_at[line.number], line) for line in self.lines if line.is_common]
        return _chosen([at + n for at, line in common for n in range(1 + line.has_took_s)])

    @cached_property
    def _paths(self) -> _Chosen:
        """The paths among what is a file's own: one with escapes may end elsewhere."""
        named = [line for line in self.lines if line.has_path]
        return _chosen([self.own_at[line.number] + 1 + line.has_took_s for line in named])


_Chosen = Callable[[Sequence[bytes]], tuple[bytes, ...]]


def _chosen(places: list[int]) -> _Chosen:
    """What takes the items at these places out of a list."""
    if len(places) < 2:
        return lambda items: tuple(items[place] for place in places)
    return operator.itemgetter(*places)


def _mould_of(lines: Sequence[_Line], rank: int) -> _Mould:
    """The mould of the file of a rank with these lines."""
    reader = columns.Reader()
    kept: list[_Line] = []
    facts: list[Fact] = []
    for line in lines:
        said = _said(reader, line) if line.is_common else None
        if said is not None and line.rank == rank:
            facts.append(Fact(line.kind, rank, line.step, said, line.number))
        elif line.is_common and line.kind != _LAYOUT:
            continue
        kept.append(line)
    written = [line.number for line in kept if line.as_written]
    whole = bool(lines) and written == list(range(1, 1 + lines[-1].number))
    return _Mould(kept, facts, whole)


def _said(reader: columns.Reader, line: _Line) -> _Data | None:
    """What a line of a common kind says; None for a layout, which the reader keeps, and for what is
    not readable.
    """
    try:
        if line.kind != _LAYOUT:
            return reader.resolved(line.kind, line.rest)
        reader.keep_layout(line.rest)
    except _UNREADABLE:
        pass
    return None


def _own_fact(text: bytes, kind: str, number: int) -> Fact | None:
    """The fact of a line of a file's own kinds, from its time on; None when it is not readable."""
    try:
        data: _Data = columns.parsed(b'{"t":' + text)
        _, rank, step = float(data.pop("t")), int(data.pop("rank")), int(data.pop("step"))
    except _UNREADABLE:
        return None
    return Fact(kind, rank, step, data, number)
