"""What `ckptdrill diff` prints: where two checkpoints differ, tensor by tensor, value by value.

Both are read first; then each logical tensor is compared as it comes, in blocks, so that memory
does not grow with the checkpoints. Names are compared without what wrappers add to them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ckptdrill import inspecting
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.formats import compare, stacks
from ckptdrill.formats.compare import EQUAL, Outcome, Row, Value
from ckptdrill.formats.leaves import printable
from ckptdrill.formats.stacks import Checkpoint, Tensor

_MAX_VALUES = 100
_ONE_SIDED = frozenset({Outcome.ONLY_A, Outcome.ONLY_B})


def diff(a: Path, b: Path, *, tolerance: float | None, as_json: bool) -> ExitCode:
    """Compare two checkpoints and print what differs; AS_EXPECTED when nothing does.

    Raises UserError when one of them cannot be read, or the tolerance is no size of a difference.
    """
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise UserError(f"--tolerance {tolerance} is no size of a difference")
    one, other = stacks.read(a), stacks.read(b)
    compared = compare.tensors(one, other, tolerance)
    values = differing(one, other)
    if as_json:
        rows = list(compared)
        print(json.dumps(document(one, other, rows, values), indent=2))  # noqa: T201 - the output
        return _code(rows, values)
    seen: list[Row] = []
    for line in page(one, other, _kept(compared, seen), values):
        print(line)  # noqa: T201 - same
    return _code(seen, values)


def _code(rows: list[Row], values: list[Value]) -> ExitCode:
    equal = all(row.outcome in EQUAL for row in rows) and not values
    return ExitCode.AS_EXPECTED if equal else ExitCode.UNSUPPORTED


def _kept(rows: Iterable[Row], seen: list[Row]) -> Iterator[Row]:
    """The rows as they come, each also into `seen`."""
    for row in rows:
        seen.append(row)
        yield row


def differing(a: Checkpoint, b: Checkpoint) -> list[Value]:
    """The values that are no tensors and differ."""
    return [each for each in compare.values(a, b) if _counts(each, a, b)]


def _counts(value: Value, a: Checkpoint, b: Checkpoint) -> bool:
    """Whether it is a difference: two formats keep other values beside the tensors, rightly so."""
    return value.outcome not in EQUAL and (value.outcome not in _ONE_SIDED or a.form == b.form)


def document(
    a: Checkpoint, b: Checkpoint, rows: Iterable[Row], values: Iterable[Value]
) -> dict[str, Any]:
    """All rows, also the equal ones, and the values that differ, as JSON. An infinite difference
    (NaN on one side) is the text `inf`.
    """
    return {
        "a": _side(a),
        "b": _side(b),
        "tensors": [
            {
                "state": row.what,
                "name": row.name,
                "outcome": row.outcome.value,
                "a": _stored(row.a, row.digest_a),
                "b": _stored(row.b, row.digest_b),
                "largest_absolute": _number(row.largest_absolute),
                "largest_relative": _number(row.largest_relative),
                "at": None if row.at is None else list(row.at),
                "detail": row.detail,
            }
            for row in rows
        ],
        "values": [
            {
                "state": value.what,
                "name": value.name,
                "outcome": value.outcome.value,
                "a": value.a and value.a.text,
                "b": value.b and value.b.text,
            }
            for value in values
        ],
    }


def _side(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.form,
        "wrappers": list(inspecting.wrappers(checkpoint)),
        "problems": list(checkpoint.problems),
    }


def _stored(tensor: Tensor | None, digest: str | None) -> dict[str, Any] | None:
    if tensor is None:
        return None
    stored = tensor.stored
    return {
        "key": tensor.key,
        "dtype": stored.dtype,
        "shape": list(stored.shape),
        "chunks": len(stored.chunks),
        "xxh3_128": digest,
    }


def _number(value: float | None) -> float | str | None:
    return "inf" if value is not None and math.isinf(value) else value


# --------------------------------------------------------------------------------------------------
# The page


def page(a: Checkpoint, b: Checkpoint, rows: Iterable[Row], values: list[Value]) -> Iterator[str]:
    """A line per difference as it is found, and how many there were of each outcome."""
    for name, side in (("A", a), ("B", b)):
        stripped = inspecting.wrappers(side)
        more = f"; {', '.join(stripped)} taken off its names" if stripped else ""
        yield f"{name}  {side.form:<20} {side.path}{more}"
        yield from (f"   incomplete: {printable(problem, 400)}" for problem in side.problems)
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.outcome.value] += 1
        if row.outcome not in EQUAL:
            yield _line(row)
    for value in values[:_MAX_VALUES]:
        texts = [side.text if side else "nothing" for side in (value.a, value.b)]
        yield f"{value.outcome.value:<12} {printable(value.name, 200)}: {' | '.join(texts)}"
    if len(values) > _MAX_VALUES:
        yield f"… and {len(values) - _MAX_VALUES} more values: --json has them"
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    yield f"tensors: {said or 'none'}; values that differ: {len(values) or 'none'}"


def _line(row: Row) -> str:
    what = f"{row.outcome.value:<12} {printable(row.name, 200)} ({printable(row.what)})"
    if row.outcome is Outcome.UNREADABLE:
        return f"{what}: {printable(row.detail, 300)}"
    shown = [_shown(t, d) for t, d in ((row.a, row.digest_a), (row.b, row.digest_b)) if t]
    line = f"{what}: {' | '.join(shown)}"
    if row.largest_absolute is not None and row.at is not None:
        line += (
            f"; at most {row.largest_absolute:.6g} at {list(row.at)},"
            f" relative {row.largest_relative:.6g}"
        )
    return line


def _shown(tensor: Tensor, digest: str | None) -> str:
    stored = tensor.stored
    return f"{stored.dtype} {list(stored.shape)}" + (f" {digest[:16]}" if digest else "")
