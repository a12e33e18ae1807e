"""The lines that a verdict cites, short enough to stand on the page. Pure.

A browser opens a file of facts at its first line, and the fact may be a megabyte long: what is
shown beside a verdict is its kind, its step and how it begins. `cited` names what to read, from the
stored verdict alone; `line` makes of what was read what is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ckptdrill.model import Held, JsonValue, VerdictWord

# What is read of a line, and what is shown of it.
HEAD_BYTES = 600
_SHOWN = 80
# So many distinct facts of a cell; of one that passed, whose rows say all the same, fewer.
_MOST, _MOST_OF_A_PASS = 10, 6
_OF_A_VERDICT, _OF_A_ROW = 8, 4
_LINE = re.compile(r"(launches/[\w.+=-]+/rank\d+\.jsonl):(\d+)", re.ASCII)
_HEAD = re.compile(r'\{"fact": ?"(\w{1,40})",.*?"step": ?(-?\d{1,18})(?:, ?|\})(.*)', re.DOTALL)
_DIGEST = re.compile(r'(?<=")([0-9a-f]{8})[0-9a-f]{8,}')
_PATH = re.compile(r'"/[^"]*/([^"/]+/[^"/]+)"')


@dataclass(frozen=True)
class CitedLine:
    """A fact that a verdict rests on: `step` is counted by its launch, `begins` is how the rest of
    the line begins, with digests cut to eight digits and paths to their last two names.
    """

    kind: str
    step: int
    begins: str


def cited(verdict: JsonValue) -> tuple[str, ...]:
    """The refs of the lines to show: what decided the verdict first, then row by row, worst first.

    Empty for what is no verdict.
    """
    if not isinstance(verdict, Mapping):
        return ()
    most = _MOST_OF_A_PASS if verdict.get("word") == VerdictWord.PASS else _MOST
    found = dict.fromkeys(ref for ref in _in_order(verdict) if _LINE.fullmatch(ref))
    return tuple(islice(found, most))


def _in_order(verdict: Mapping[str, JsonValue]) -> Iterator[str]:
    yield from _texts(verdict.get("facts"), _OF_A_VERDICT)
    checks = verdict.get("checks")
    rows = [row for row in checks if isinstance(row, Mapping)] if isinstance(checks, list) else []
    for row in sorted(rows, key=lambda row: row.get("status") == Held.HELD):
        yield from _texts(row.get("facts"), _OF_A_ROW)


def _texts(refs: JsonValue, most: int) -> Iterable[str]:
    return map(str, refs[:most]) if isinstance(refs, list) else ()


def place(ref: str) -> tuple[str, int]:
    """File and line number of a ref that `cited` gave."""
    file, _, number = ref.rpartition(":")
    return file, int(number)


def line(head: str) -> CitedLine | None:
    """What is shown of a line that begins with `head`; None where it is no fact."""
    found = _HEAD.match(head)
    if found is None:
        return None
    rest = _PATH.sub(r'"…/\1"', _DIGEST.sub(r"\1…", found[3].strip()))
    begins = rest.removesuffix("}") if len(rest) <= _SHOWN else f"{rest[:_SHOWN]}…"
    return CitedLine(found[1], int(found[2]), begins)
