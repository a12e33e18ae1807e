"""A fingerprint that can be moved: parts in plain tensors do not say where they belong.

Every element is its bits, as signed lanes of 16 bits (of 8 where it has but one byte). The digest
is the sum over all lanes of ``lane * c**l * a0**i * a1**j * …`` modulo two primes of 31 bits, one
base per dimension. That of a part at offset (o, p) of something larger is ``a0**o * a1**p`` times
its digest at (0, 0), so the judge can put a part wherever a hypothesis wants it and add up. Beside
it stands the same over the flattened elements, with a base of their own, for flat slices.

In order: `entries` describes the plain tensors among some leaves; `entry` takes one; `_contracted`
sums over as many trailing dimensions as fit one vector of weights, then over the leading ones.
A sum cannot overflow: a lane has 15 bits and a sign, a weight 31 bits, and at most 2**16 lanes are
added before they are reduced. No random numbers, nothing compiled, exact on every device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import fingerprint
from .powers import BASES, FLAT, FUSED, LANES, MAX_DIMS, PRIMES

# Layers that people keep in one tensor: gate and up, query, key and value.
_OF_SEVERAL = re.compile(
    r"qkv|kv|gate|glu|fused|in_proj|w13|w12|c_attn|query_key_value|fc1|h_to_4h|wi|up", re.IGNORECASE
)
_SUMMED = 1 << 16  # lanes that are added before a reduction
_AT_ONCE = 1 << 20  # lanes that are widened to 64 bits at a time
_SMALL_LANES = {1: torch.int8}
_weights: dict[tuple[Any, ...], torch.Tensor] = {}
_MAX_KEPT = 64


def entries(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The movable entry of every plain tensor of more than one element, by its name; of what is
    named like several layers in one, those of its blocks, too: `…qkv|3.0`, `…qkv|3.1`.
    """
    found = {}
    for name, value in leaves.items():
        if is_plain(value):
            found[name] = entry(value)
            if _OF_SEVERAL.search(name):
                found.update(_of_blocks(name, value))
    return found


def _of_blocks(name: str, tensor: torch.Tensor) -> dict[str, list[Any]]:
    plain = getattr(tensor, "_local_tensor", tensor).detach()
    return {
        f"{name}|{count}.{n}": entry(block)
        for count in FUSED
        if plain.dim() and plain.shape[0] % count == 0
        for n, block in enumerate(plain.chunk(count))
    }


def is_plain(value: Any) -> bool:
    """A strided tensor that no framework has cut."""
    return (
        isinstance(value, torch.Tensor)
        and not fingerprint.is_sharded(value)
        and not hasattr(value, "placements")
        and not fingerprint.components(value)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
        and value.numel() > 1
        and value.dim() <= MAX_DIMS
    )


def entry(tensor: torch.Tensor) -> list[Any]:
    """`[dtype, shape, offsets, sizes, digest]`, in the form of the other fingerprint's entries.

    The digest is four words of 8 hex digits: for both primes by dimensions, then flattened.
    """
    with torch.no_grad():
        plain = getattr(tensor, "_local_tensor", tensor).detach()
        shape = [int(size) for size in plain.shape]
        lanes = _lanes(plain)
        by_dim = _digest(lanes.reshape(*shape, -1), list(range(len(shape))))
        flat = by_dim if not shape else _flat(lanes)
        words = "".join(f"{word:08x}" for word in (*by_dim, *flat))
        dtype = str(tensor.dtype).replace("torch.", "", 1)
        return [dtype, shape, [0 for _ in shape], shape, words]


def _lanes(tensor: torch.Tensor) -> torch.Tensor:
    """The row-major elements as signed lanes, [elements, lanes of one]."""
    values = tensor.resolve_conj().resolve_neg()
    reals = torch.view_as_real(values) if values.is_complex() else values
    narrow = _SMALL_LANES.get(reals.element_size(), torch.int16)
    return reals.contiguous().reshape(-1).view(narrow).reshape(tensor.numel(), -1)


def _flat(lanes: torch.Tensor) -> tuple[int, ...]:
    """The digest of [elements, lanes] as one long row: rows of a fixed width, then the rest."""
    width = max(1, _SUMMED // lanes.shape[1])
    rows = len(lanes) // width
    result = [0, 0]
    for begin, count, size in ((0, rows, width), (rows * width, 1, len(lanes) - rows * width)):
        if not count or not size:
            continue
        piece = lanes[begin : begin + count * size].reshape(count, size, -1)
        for k, prime in enumerate(PRIMES):
            base = BASES[k][FLAT]
            sums = _contracted(piece, [pow(base, width, prime), base], k)
            result[k] = (result[k] + sums * pow(base, begin, prime)) % prime
    return tuple(result)


def _digest(lanes: torch.Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(_contracted(lanes, [BASES[k][d] for d in dims], k) for k in range(len(PRIMES)))


def _contracted(lanes: torch.Tensor, bases: Sequence[int], k: int) -> int:
    """The sum over all of [*dimensions, lanes] with the powers of each dimension's base."""
    prime, shape = PRIMES[k], lanes.shape
    first = len(bases)
    while first and math.prod(shape[first - 1 :]) <= _SUMMED:
        first -= 1
    if first == len(bases) and first:  # a last dimension that is longer than one sum
        return _long(lanes, bases, k)
    tail = _outer([*bases[first:], BASES[k][LANES]], shape[first:], prime, lanes.device)
    rows = lanes.reshape(-1, len(tail))
    sums = _products(rows, tail, prime)
    if not first:
        return int(sums[0])
    if len(sums) > _AT_ONCE:
        return _by_rows(sums, bases[:first], shape[:first], prime)
    head = _outer(bases[:first], shape[:first], prime, lanes.device)
    return int((sums * head % prime).sum().item()) % prime


def _by_rows(sums: torch.Tensor, bases: Sequence[int], shape: Sequence[int], prime: int) -> int:
    """Very many rows: one dimension after the other, the last first."""
    for base, size in zip(reversed(bases), reversed(shape)):
        powers = _powers(base, size, prime, sums.device)
        sums = (sums.reshape(-1, size) * powers % prime).sum(1) % prime
    return int(sums.item())


def _long(lanes: torch.Tensor, bases: Sequence[int], k: int) -> int:
    """As `_contracted`, the last dimension in pieces that are moved to where they begin."""
    prime, step = PRIMES[k], max(1, _SUMMED // lanes.shape[-1])
    total = 0
    for begin in range(0, lanes.shape[-2], step):
        piece = lanes[..., begin : begin + step, :]
        total += _contracted(piece, bases, k) * pow(bases[-1], begin, prime)
    return total % prime


def _products(rows: torch.Tensor, weights: torch.Tensor, prime: int) -> torch.Tensor:
    """The weighted sum of each row, reduced; some rows are widened at a time."""
    if not len(rows):
        return torch.zeros(1, dtype=torch.int64, device=rows.device)
    some = max(1, _AT_ONCE // len(weights))
    sums = []
    for begin in range(0, len(rows), some):
        wide = rows[begin : begin + some].to(torch.int64)
        # Accelerators have no product of 64-bit matrices.
        sums.append(torch.mv(wide, weights) if wide.is_cpu else (wide * weights).sum(1))
    return torch.cat(sums) % prime


def _outer(
    bases: Sequence[int], shape: Sequence[int], prime: int, device: torch.device
) -> torch.Tensor:
    """The weights of all elements of `shape` in row-major order, kept for the next of its shape."""
    key = (*bases, *shape, prime, device)
    if key not in _weights:
        weights = torch.ones(1, dtype=torch.int64, device=device)
        for base, size in zip(bases, shape):
            powers = _powers(base, size, prime, device)
            weights = (weights[:, None] * powers % prime).reshape(-1)
        while len(_weights) >= _MAX_KEPT:
            del _weights[next(iter(_weights))]
        _weights[key] = weights
    return _weights[key]


def _powers(base: int, size: int, prime: int, device: torch.device) -> torch.Tensor:
    """`base**0 … base**(size - 1)`, by doubling."""
    powers = torch.ones(1, dtype=torch.int64, device=device)
    while len(powers) < size:
        powers = torch.cat([powers, powers * pow(base, len(powers), prime) % prime])
    return powers[:size]
