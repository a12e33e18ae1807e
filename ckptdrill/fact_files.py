"""Read back the fact files of a launch: one file a rank, one line a fact, torn lines passed over.

In order: take every line apart into its head and the rest of its data; look up what files that say
the same had to it; resolve the columns of the others. A thousand cells of 64 ranks are three
million lines, and jobs that repeat themselves differ in times and paths alone. So what a file says
besides those is the key under which it was read before, byte for byte, and only lines of other
kinds are read for every file anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ckptdrill import columns
from ckptdrill.model import Fact, JsonValue, LaunchRecord
from ckptdrill.store import RunFolder, read_json

# Kind, time, rank, step, the time that it took, the path that it names, the rest.
_LINE = re.compile(
    rb'^\{"fact":"(\w+)","t":([-+.\de]+),"rank":(\d+),"step":(\d+)'
    rb'(?:,"took_s":([-+.\de]+))?(?:,"path":"([^"\\]*)")?(?:,(.*))?\}$',
    re.MULTILINE,
)
_LAYOUT = b"layout"
_COMMON = frozenset((_LAYOUT, *(kind.encode() for kind in columns.COMMON)))
_FILES = 1024  # remembered: the ranks of some topologies, with what few of them have of their own
_LARGE_FILE_BYTES = 256 * 1024  # those of large models would fill the memory
_UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
_Parts = tuple[bytes, ...]
_Known = tuple[str, int, int, Mapping[str, JsonValue]]


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
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    numbers, lines = _taken_apart(content)
    said = tuple([(k, r, s, rest) if k in _COMMON else () for k, _, r, s, _, _, rest in lines])
    remembered = _common if len(content) <= _LARGE_FILE_BYTES else _common.__wrapped__
    common = remembered(said)
    reader = common.reader.copy()
    facts: list[Fact] = []
    for number, line, known in zip(numbers, lines, common.known, strict=True):
        kind, t, rank, step, took_s, path_named, rest = line
        if kind == _LAYOUT:
            continue
        try:
            name, of_rank, at_step, data = known or _read(reader, kind, rank, step, rest)
            if path_named:
                data = {"path": path_named.decode(), **data}
            if took_s:
                data = {"took_s": float(took_s), **data}
            facts.append(Fact(name, of_rank, at_step, float(t), data, shown, number))
        except _UNREADABLE:
            continue
    return facts


def _taken_apart(content: bytes) -> tuple[Iterable[int], list[_Parts]]:
    """The readable lines of a file as `_LINE` has them, and the number of each."""
    lines = _LINE.findall(content)
    if len(lines) == content.count(b"\n"):
        return range(1, len(lines) + 1), lines
    parts = [(n, _parts(line)) for n, line in enumerate(content.split(b"\n"), 1)]
    return [n for n, found in parts if found], [found for _, found in parts if found]


def _parts(line: bytes) -> _Parts | None:
    """The parts of one line, whose keys may stand in another order; None when it is no fact."""
    found = _LINE.fullmatch(line)
    if found:
        return tuple(found.groups(b""))
    try:
        value = columns.parsed(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or "fact" not in value:
        return None
    kind = str(value.pop("fact"))
    t, rank, step = (str(value.pop(name, 0)).encode() for name in ("t", "rank", "step"))
    rest = json.dumps(value, separators=(",", ":")).encode()[1:-1]
    return kind.encode(), t, rank, step, b"", b"", rest


@dataclass(frozen=True, eq=False)
class _Common:
    """The common lines of a file in their places, None for all others and for what rests on one of
    them, and a reader that has read what is common.
    """

    known: tuple[_Known | None, ...]
    reader: columns.Reader


@lru_cache(maxsize=_FILES)
def _common(said: tuple[tuple[bytes, ...], ...]) -> _Common:
    reader = columns.Reader()
    return _Common(tuple([_known(reader, *line) if line else None for line in said]), reader)


def _known(
    reader: columns.Reader, kind: bytes, rank: bytes, step: bytes, rest: bytes
) -> _Known | None:
    try:
        if kind != _LAYOUT:
            return _read(reader, kind, rank, step, rest)
        reader.keep_layout(rest)
    except _UNREADABLE:
        pass
    return None


def _read(reader: columns.Reader, kind: bytes, rank: bytes, step: bytes, rest: bytes) -> _Known:
    return kind.decode(), int(rank), int(step), reader.resolved(kind.decode(), rest)
