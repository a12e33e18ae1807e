"""Find how parts fit together that ranks hold in plain tensors. Pure.

A plain tensor whose content or shape differs from rank to rank is a part, not a whole of the wrong
shape; nothing in it says where it belongs. So, for the names of one kind of state that do not
simply agree: (1) `fit` takes what each rank holds under the name in both runs; (2) `_orders` lists
the ways in which ranks may stand for parts (replicas count once); (3) `_wholes` lays the parts of
each way side by side along every dimension, or end to end when they are flat, by moving their
digests (observer/movable.py) and adding up; (4) a whole that both runs have in common is proof.
Names that are numbered anew on every rank, as experts are, are told apart by `_renumbered`.

Where source and target have no whole in common, but the source's parts make up the whole leaf in
the source's own save, or the framework or the owner says how they are cut, the target's parts are
wrong: that is broken. What nothing explains is unknown, which is never an accusation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ckptdrill.columns import Part
from ckptdrill.judge.logical import is_entry
from ckptdrill.model import Cut, Fact, JsonValue
from ckptdrill.observer.powers import BASES, FLAT, FUSED, PRIMES

_NUMBER = re.compile(r"\d+")
_NOTHING = (0, 0, 0, 0)
Digest = tuple[int, ...]
Whole = tuple[str, str, tuple[int, ...], Digest]
"""How it was made (`dim 0`, `flat`), dtype, shape and digest."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds under one name. `moves` has the words of its movable digest, `blocks`
    those of its first dimension in 2 or 3 equal blocks, where its name is that of a fused layer.
    """

    rank: int
    dtype: str
    shape: tuple[int, ...]
    digest: str
    moves: Digest | None = None
    blocks: Mapping[int, tuple[Digest, ...]] = field(default_factory=dict, hash=False)

    @property
    def content(self) -> tuple[str, tuple[int, ...], str]:
        """What equal pieces have in common."""
        return self.dtype, self.shape, self.digest


Held = Mapping[str, tuple[Piece, ...]]


@dataclass(frozen=True)
class Fit:
    """Of the names that were asked for: those proven right, what is wrong with others, and what is
    not known of the rest, both in words that begin with the name.
    """

    right: frozenset[str] = frozenset()
    broken: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()  # all that are parts: no other judgement applies to them
    ways: Mapping[str, frozenset[str]] = field(default_factory=dict)  # how the right ones fit


@dataclass(frozen=True)
class Given:
    """What is known of parts beside the two states."""

    saved: tuple[Fact, ...] = ()  # the source's own save at the restored step
    declared: Mapping[str, Cut] = field(default_factory=dict)  # by glob, of the owner
    stated: Mapping[str, int] = field(default_factory=dict)  # name -> dimension, of the framework
    # How the same names fit in two uninterrupted runs that begin alike: what a job's own layout is.
    begun: Mapping[str, frozenset[str]] = field(default_factory=dict)


def fit(
    source: Sequence[Fact],
    target: Sequence[Fact],
    part: str,
    asked: Collection[str],
    given: Given | None = None,
) -> Fit:
    """How the names of `asked` fit; those that are no parts are in none of the sets."""
    if not asked or max(len(source), len(target)) < 2:
        return Fit()
    given = given or Given()
    before, after = _held(source, part), _held(target, part)
    proven = _renumbered(before, after, asked)
    right, broken, unknown = set(proven), list[str](), list[str]()
    wholes = _saved_wholes(given.saved)
    any_parts = any(_differ(pieces) for held in (before, after) for pieces in held.values())
    families = _families_of_parts(before, after)
    ways: dict[str, frozenset[str]] = {}
    for name in sorted(set(asked) - proven):
        one, two = before.get(name, ()), after.get(name, ())
        if not one or not two:
            says = _of_one_run(name, families, given)
            if says is None:
                continue
        elif not _is_part(one, two, any_parts):
            continue
        else:
            says = _verdict(name, one, two, wholes, _dim_of(name, given))
            ways[name] = _ways(one, two) if says is None else frozenset()
            if says is None:
                says = _otherwise(name, ways[name], given.begun.get(name, frozenset()))
        if says is None:
            right.add(name)
        elif says:
            broken.append(says)
        elif not one or not two or not _private(one, two):
            unknown.append(_told(name, one, two))
    told = {text.split(" ", 1)[0].rstrip(":") for text in (*broken, *unknown)}
    return Fit(frozenset(right), tuple(broken), tuple(unknown), frozenset(right | told), ways)


def _of_one_run(name: str, families: set[tuple[str, str]], given: Given) -> str | None:
    """What is said of a name that only one run has: "" for one that may be another number there,
    None for one that is no part.
    """
    if _is_local(name, given.declared):
        return f"{name} is not the reference's, counted through over the ranks"
    return "" if _family(name) & families else None


def advice(unknown: Iterable[str]) -> str:
    """The lines of `policy.parts` that would settle what is not known."""
    asked = sorted({text.split(" ", 1)[0].rstrip(":") for text in unknown})[:4]
    lines = ", ".join(f'"{name}": {{dim: …}}' for name in asked)
    return (
        f"say in the matrix how they fit, as policy.parts: {{{lines}}} (the dimension along which "
        "each is cut, or `names: local` where every rank numbers its own from 0), or save whole "
        "tensors at the restored step"
    )


# ------------------------------------------------------------------------------ what ranks hold


def _held(facts: Sequence[Fact], part: str) -> Held:
    """Name -> the pieces of all ranks that hold it, of plain values and plain tensors."""
    found: dict[str, list[Piece]] = {}
    for fact in facts:
        moves = fact.data.get("movable", {})
        for name, value in fact.data.get(part, {}).items():
            piece = _piece(fact.rank, value, f"{part}:{name}", moves)
            if piece is not None:
                found.setdefault(name, []).append(piece)
    return {name: tuple(pieces) for name, pieces in found.items()}


def _piece(rank: int, value: JsonValue, key: str, moves: Mapping[str, JsonValue]) -> Piece | None:
    if isinstance(value, str) and value.startswith("<"):
        return None
    if not is_entry(value):
        return Piece(rank, "value", (), repr(value))
    dtype, shape, offsets, sizes, digest = value
    if any(offset != 0 for offset in offsets) or list(shape) != list(sizes):
        return None  # it has a place
    return Piece(rank, dtype, tuple(shape), digest, _words(moves.get(key)), _blocks(key, moves))


def _blocks(key: str, moves: Mapping[str, JsonValue]) -> dict[int, tuple[Digest, ...]]:
    found = {}
    for count in FUSED:
        words = [_words(moves.get(f"{key}|{count}.{n}")) for n in range(count)]
        whole = tuple(each for each in words if each is not None)
        if len(whole) == count:
            found[count] = whole
    return found


def _words(moves: JsonValue) -> Digest | None:
    if not is_entry(moves):
        return None
    return tuple(int(moves[4][at : at + 8], 16) for at in range(0, 32, 8))


def _saved_wholes(facts: Sequence[Fact]) -> frozenset[tuple[str, tuple[int, ...], Digest]]:
    """(dtype, shape, movable digest) of every plain leaf of a save."""
    found = set()
    for fact in facts:
        part = fact.data.get("movable", {})
        for value in part.values() if isinstance(part, (dict, Part)) else ():
            if is_entry(value) and (words := _words(value)) is not None:
                found.add((value[0], tuple(value[1]), words[:2]))
    return frozenset(found)


def _differ(pieces: Sequence[Piece]) -> bool:
    return len({piece.content for piece in pieces}) > 1


def _is_part(one: Sequence[Piece], two: Sequence[Piece], any_parts: bool) -> bool:
    """Whether a name stands for parts in either run.

    Where all ranks of one run hold the same, of the shape that the other has too, it is a whole
    whose replicas have parted. Parts may all be equal, too (zeros): then others that are parts, and
    a shape that is another, tell.
    """
    shapes = [{piece.shape for piece in pieces} for pieces in (one, two)]
    if one[0].dtype != two[0].dtype or {()} in shapes:
        return False
    same_shape = shapes[0] == shapes[1] and len(shapes[0]) == 1
    if same_shape:
        return _differ(one)
    return _differ(one) or _differ(two) or any_parts


def _private(one: Sequence[Piece], two: Sequence[Piece]) -> bool:
    """State that every rank holds for itself, at equal numbers of ranks: compared rank by rank."""
    return [p.shape for p in one] == [p.shape for p in two]


# --------------------------------------------------------------------------- wholes out of parts


def _verdict(
    name: str,
    one: Sequence[Piece],
    two: Sequence[Piece],
    saved: Collection[tuple[str, tuple[int, ...], Digest]],
    dim: int | None,
) -> str | None:
    """None when proven right, what is wrong in words, or "" when nothing is known."""
    if [p.content for p in one] == [p.content for p in two]:
        return None
    if any(piece.moves is None for piece in (*one, *two)):
        return ""
    before, after = _wholes(one, dim), _wholes(two, dim)
    if any(_meet(a, b) for a in before for b in after):
        return None
    of_saved = [w for w in before if (w[1], w[2], w[3][:2]) in saved]
    known = of_saved if dim is None else before
    for whole in known:
        alike = [w for w in after if w[0] == whole[0] and w[2] == whole[2]]
        ends = [w for w in after if len({p.content for p in two}) == 1 and w[2] == whole[2]]
        if alike or ends:
            return _wrong(name, one, two, whole[0])
    return ""


def _ways(one: Sequence[Piece], two: Sequence[Piece]) -> frozenset[str]:
    """How the parts of both runs are cut, in each way in which they make up one whole; of a run
    that holds the whole, nothing.
    """
    if any(piece.moves is None for piece in (*one, *two)):
        return frozenset()
    cut = [len({piece.content for piece in pieces}) > 1 for pieces in (one, two)]
    if not any(cut):
        return frozenset()  # zeros and ones fit in every way
    return frozenset(
        " and ".join(w[0] for w, is_cut in zip((a, b), cut, strict=True) if is_cut)
        for a in _wholes(one, None)
        for b in _wholes(two, None)
        if _meet(a, b)
    )


def _otherwise(name: str, ways: frozenset[str], begun: frozenset[str]) -> str | None:
    """What is wrong with parts that make up one whole in another way than in runs that the job
    begins itself: bytes that came back, at places where they do not belong.
    """
    if not ways or not begun or ways & begun:
        return None
    return (
        f"{name} is put together otherwise than the job does it itself: its parts are those of one "
        f"tensor cut along {min(ways)}, and the job cuts along {min(begun)}"
    )


def _meet(one: Whole, other: Whole) -> bool:
    """Equal content and shape; or of a shape that zeros at the end make longer."""
    how, dtype, shape, digest = one
    if dtype != other[1] or (digest[:2] != other[3][:2] and how != "flat"):
        return False
    if how == "flat" or other[0] == "flat":
        equal = digest[2:] == other[3][2:] != (0, 0)
        return how == other[0] == "flat" and (
            equal or (digest[2:] == other[3][2:] and shape == other[2])
        )
    if shape == other[2]:
        return True
    longer = [d for d, (a, b) in enumerate(zip(shape, other[2], strict=False)) if a != b]
    padded = len(shape) == len(other[2]) and len(longer) == 1 and any(digest[:2])
    return padded and how == other[0] == f"dim {longer[0]}"


def _wholes(pieces: Sequence[Piece], dim: int | None) -> list[Whole]:
    """Every whole that the pieces may be of: along each dimension, in each order of the ranks."""
    found: dict[Whole, None] = {}
    for order in _orders(pieces):
        dims = range(len(order[0].shape)) if dim is None else [dim]
        for d in dims:
            if (whole := _along(order, d)) is not None:
                found.setdefault(whole)
        if dim in (None, 0):
            for count in FUSED:
                if (whole := _fused(order, count)) is not None:
                    found.setdefault(whole)
        if dim is None and (whole := _flat(order)) is not None:
            found.setdefault(whole)
    return list(found)


def _orders(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """The sequences of parts that ranks may stand for.

    With a degree that divides their number, neighbours hold different parts (replicas are `degree`
    apart) or neighbours are the replicas. Else the different contents in the order of ranks.
    """
    found: dict[tuple[object, ...], tuple[Piece, ...]] = {}
    ranks = sorted(pieces, key=lambda piece: piece.rank)
    count = len(ranks)
    for degree in (n for n in range(1, count + 1) if count % n == 0):
        each = count // degree
        for take in (ranks[:degree], ranks[::each]):
            spread = (
                take * each if take == ranks[:degree] else [p for p in take for _ in range(each)]
            )
            if [p.content for p in spread] == [p.content for p in ranks]:
                found.setdefault(tuple(p.content for p in take), tuple(take))
    first: dict[object, Piece] = {}
    for piece in ranks:
        first.setdefault(piece.content, piece)
    found.setdefault(tuple(first), tuple(first.values()))
    return list(found.values())


def _along(order: Sequence[Piece], dim: int) -> Whole | None:
    """The parts side by side along one dimension; None where they do not fit."""
    shape = list(order[0].shape)
    if dim >= len(shape):
        return None
    rest = [shape[:dim] + shape[dim + 1 :]]
    if any([*p.shape[:dim], *p.shape[dim + 1 :]] not in rest for p in order):
        return None
    shape[dim] = 0
    total, flat = [0, 0], (0, 0)
    for piece in order:
        words = piece.moves or _NOTHING
        for k, prime in enumerate(PRIMES):
            moved = words[k] * pow(BASES[k][dim], shape[dim], prime)
            total[k] = (total[k] + moved) % prime
        shape[dim] += piece.shape[dim]
    if len(order) == 1:
        words = order[0].moves or _NOTHING
        flat = words[2], words[3]
    elif dim == 0:
        flat = _flat_words(order)
    else:
        flat = (-1, -1)  # not known: rows of the parts alternate
    return f"dim {dim}", order[0].dtype, tuple(shape), (*total, *flat)


def _fused(order: Sequence[Piece], count: int) -> Whole | None:
    """Layers in one tensor, each cut by itself: the first blocks of all parts, then the second."""
    if len(order) < 2 or any(count not in p.blocks for p in order):
        return None
    rest = {p.shape[1:] for p in order}
    if len(rest) != 1:
        return None
    rows = sum(p.shape[0] for p in order)
    total = [0, 0]
    begin = 0
    for n in range(count):
        for piece in order:
            for k, prime in enumerate(PRIMES):
                moved = piece.blocks[count][n][k] * pow(BASES[k][0], begin, prime)
                total[k] = (total[k] + moved) % prime
            begin += piece.shape[0] // count
    how = f"dim 0 in {count} blocks"
    return how, order[0].dtype, (rows, *order[0].shape[1:]), (*total, -1, -1)


def _flat(order: Sequence[Piece]) -> Whole | None:
    """The elements of the parts end to end."""
    return "flat", order[0].dtype, (sum(map(_size, order)),), (0, 0, *_flat_words(order))


def _flat_words(order: Sequence[Piece]) -> tuple[int, int]:
    total, begin = [0, 0], 0
    for piece in order:
        words = piece.moves or _NOTHING
        for k, prime in enumerate(PRIMES):
            moved = words[2 + k] * pow(BASES[k][FLAT], begin, prime)
            total[k] = (total[k] + moved) % prime
        begin += _size(piece)
    return total[0], total[1]


def _size(piece: Piece) -> int:
    result = 1
    for size in piece.shape:
        result *= size
    return result


def _wrong(name: str, one: Sequence[Piece], two: Sequence[Piece], how: str) -> str:
    """What is wrong with the target's parts, which do not make up the source's whole."""
    contents = {p.content: p.rank for p in reversed(one)}
    there = [(p.rank, contents[p.content]) for p in two if p.content in contents]
    ranks = _wrong_ranks(one, two, how)
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    moved = f": rank {there[0][0]} holds the source's part of rank {there[0][1]}" if there else ""
    return f"{name}{where} is not the reference's part (cut along {how}){moved}"


def _wrong_ranks(one: Sequence[Piece], two: Sequence[Piece], how: str) -> list[int]:
    """The ranks of the target whose parts do not make up one part of the source, where a whole
    number of parts makes one.
    """
    if not how.startswith("dim"):
        return []
    dim = int(how.split()[1])
    before, after = (max(_orders(pieces), key=len) for pieces in (one, two))
    if len(after) % len(before):
        return []
    each = len(after) // len(before)
    wrong = []
    for position, whole in enumerate(before):
        group = after[position * each : (position + 1) * each]
        made = _along(group, dim)
        if made is None or whole.moves is None or made[3][:2] != whole.moves[:2]:
            wrong += [piece.rank for piece in group]
    return wrong


# ------------------------------------------------------------------- names that ranks count alone


def _renumbered(before: Held, after: Held, asked: Collection[str]) -> set[str]:
    """Those of the names that are numbered anew on every rank, and whose members, counted through
    over the ranks, are the same in both runs.
    """
    right: set[str] = set()
    tried: set[tuple[str, str]] = set()
    for name in asked:
        for family in _family(name) - tried:
            tried.add(family)
            one, two = _counted(before, family), _counted(after, family)
            if any(list(a) == list(b) for a in one for b in two if len(a) > 1):
                right |= {n for n in (*before, *after) if family in _family(n)} & set(asked)
    return right


def _family(name: str) -> set[tuple[str, str]]:
    """What stands before and after each number in a name."""
    return {(name[: m.start()], name[m.end() :]) for m in _NUMBER.finditer(name)}


def _counted(held: Held, family: tuple[str, str]) -> list[list[object]]:
    """The contents of a family in the order of ranks and, on each, of numbers: once for every way
    in which ranks are replicas of each other.
    """
    by_rank: dict[int, dict[int, object]] = {}
    head, tail = family
    for name, pieces in held.items():
        middle = name[len(head) : len(name) - len(tail)]
        if name == head + middle + tail and middle.isdigit():
            for piece in pieces:
                by_rank.setdefault(piece.rank, {})[int(middle)] = piece.content
    ranks = [[content for _, content in sorted(by_rank[r].items())] for r in sorted(by_rank)]
    found = []
    for degree in (n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0):
        each = len(ranks) // degree
        if ranks[:degree] * each == ranks:
            found.append([c for rank in ranks[:degree] for c in rank])
        if [r for r in ranks[::each] for _ in range(each)] == ranks:
            found.append([c for rank in ranks[::each] for c in rank])
    return found


def _families_of_parts(before: Held, after: Held) -> set[tuple[str, str]]:
    """Families of which some member differs from rank to rank."""
    return {
        family
        for held in (before, after)
        for name, pieces in held.items()
        if _differ(pieces)
        for family in _family(name)
    }


# ------------------------------------------------------------------------------------- words


def _dim_of(name: str, given: Given) -> int | None:
    """The dimension along which a name is cut, as the framework or the owner says."""
    parameter = name.rpartition(":")[2].rpartition(".")[0]
    for each in (name, parameter):
        if each in given.stated:
            return given.stated[each]
        for glob, cut in given.declared.items():
            if fnmatchcase(each, glob) and cut.dim is not None:
                return cut.dim
    return None


def _is_local(name: str, declared: Mapping[str, Cut]) -> bool:
    return any(fnmatchcase(name, glob) and cut.local for glob, cut in declared.items())


def _told(name: str, one: Sequence[Piece], two: Sequence[Piece]) -> str:
    return f"{name} ({_shapes(one)}, {_shapes(two)} after the restore)"


def _shapes(pieces: Sequence[Piece]) -> str:
    if not pieces:
        return "on no rank"
    shapes = " or ".join(sorted({str(list(piece.shape)) for piece in pieces}))
    return f"{shapes} on {len(pieces)} rank{'' if len(pieces) == 1 else 's'}"
