"""Shows what a checkpoint holds besides tensors: counters, hyper-parameters, states of generators.

Values come from pickles that were read without executing them. Each is shown as a short line that
no terminal can stumble over, with a digest of the whole of it, so that two can be compared however
long they are. Lists of plain values are one leaf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from ckptdrill.formats import pickles, torch_save

MAX_LEAVES = 20_000
_MAX_VISITS = 300_000
_MAX_DEPTH = 32
_MAX_TEXT = 80
_MAX_INT_BITS = 256
_PLAIN = (bool, int, float, str, bytes)
Plain = bool | int | float | str | None


@dataclass(frozen=True)
class Leaf:
    """A value as one line of at most 100 characters, and the digest of all of it (16 hex digits).

    `value` is the value itself when it is one plain value of ordinary length, else None.
    """

    text: str
    digest: str
    value: Plain = None

    @property
    def says(self) -> bool:
        """False for the values that stand for nothing."""
        return self.text not in ("None", "[]", "")


def below(content: Any) -> dict[str, Leaf]:
    """The leaves of what `pickles.load` gave, by dotted key, without the tensors.

    At most `MAX_LEAVES`. Raises Refused when a key is longer than any checkpoint's.
    """
    found: dict[str, Leaf] = {}
    waiting, budget = [("", content, 0)], _Budget(_MAX_VISITS)
    while waiting and len(found) < MAX_LEAVES and budget.left > 0:
        key, value, depth = waiting.pop()
        budget.left -= 1
        if torch_save.as_tensor(value) is not None:
            continue
        inner = _opened(value, depth)
        if inner is None:
            found[key] = _leaf(value, budget)
            continue
        budget.left -= len(inner)
        wanted = inner[: MAX_LEAVES - len(found)]
        waiting += [(torch_save.joined(key, name), item, depth + 1) for name, item in wanted[::-1]]
    return found


def leaf(value: Any) -> Leaf:
    """One value, whatever it is, as a leaf."""
    return _leaf(value, _Budget(_MAX_VISITS))


@dataclass
class _Budget:
    """How many values may still be looked at: one can be referred to from many places."""

    left: int


def _leaf(value: Any, budget: _Budget) -> Leaf:
    digest = xxhash.xxh3_64()
    for piece in _flattened(value, budget):
        digest.update(piece)
    plain = value if _is_short(value) else None
    return Leaf(_text(value), digest.hexdigest(), plain)


def printable(text: str, limit: int = _MAX_TEXT) -> str:
    """The text without anything that a terminal would act on, and cut to `limit` characters."""
    cut = text[:limit]
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return safe if len(text) <= limit else f"{safe}… ({len(text)} characters)"


def _opened(value: Any, depth: int) -> list[tuple[Any, Any]] | None:
    """What a container holds; None for what is shown as one leaf."""
    if depth > _MAX_DEPTH or not isinstance(value, (list, tuple, pickles.Made)):
        return None
    inner = list(torch_save.children(value))
    if not isinstance(value, pickles.Pairs) and all(_is_plain(item) for _, item in inner):
        return None if not isinstance(value, pickles.Made) or not inner else inner
    return inner


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, _PLAIN)


def _is_short(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int):
        return value.bit_length() <= _MAX_INT_BITS
    return isinstance(value, float) or (isinstance(value, str) and len(value) <= _MAX_TEXT)


def _text(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, (list, tuple)):
        return _text_of_list(value)
    if isinstance(value, pickles.Symbol):
        return printable(f"{value.module}.{value.name}")
    if isinstance(value, pickles.Made):
        return _text_of_call(value)
    return "a storage" if isinstance(value, pickles.Persistent) else repr(value)


def _text_of_list(value: list[Any] | tuple[Any, ...]) -> str:
    shown = [_text(item)[:24] if _is_plain(item) else "…" for item in value[:6]]
    more = f", … {len(value)} values" if len(value) > 6 else ""
    return printable(f"[{', '.join(shown)}{more}]", 100)


def _text_of_call(value: pickles.Made) -> str:
    inner = ", ".join(_text(item)[:40] for item in value.args[:3] if _is_plain(item))
    return printable(f"{value.what.name}({inner})")


def _flattened(value: Any, budget: _Budget) -> Iterator[bytes]:
    """The value as bytes, piece by piece, as far as the budget goes."""
    waiting = [value]
    while waiting and budget.left > 0:
        item = waiting.pop()
        budget.left -= 1
        if isinstance(item, (list, tuple)):
            yield f"[{len(item)}".encode()
            budget.left -= len(item)
            waiting += item[: max(budget.left, 0)]
        elif isinstance(item, pickles.Made):
            yield f"({item.what.name}".encode()
            waiting += [item.args, item.state, item.items]
        else:
            yield from _bytes_of(item)


def _bytes_of(item: Any) -> Iterator[bytes]:
    yield type(item).__name__.encode()
    if isinstance(item, int):
        yield item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True)
    elif isinstance(item, bytes):
        yield item
    elif isinstance(item, pickles.Symbol):
        yield f"{item.module}.{item.name}".encode()
    elif isinstance(item, (str, float)):
        yield str(item).encode("utf-8", "surrogatepass")
