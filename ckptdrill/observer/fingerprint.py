"""Fingerprint a tensor shard by shard, so that every layout of it sums to one digest.

Checkpoints are resharded: the same parameter is a row slab here, a column slab there, a flat range
of a ZeRO buffer elsewhere. Comparing them must not gather anything. So the digest is a sum over the
row-major bytes of the *logical* tensor, each rank adds up the part that it holds, and whoever reads
the facts adds the ranks together.

Definition, complete. Let ``x[i]`` be the signed little-endian 64-bit word made of the bytes
``8i … 8i+7`` of the row-major logical tensor (bytes past the end, or held by another rank, are 0)::

    word0 = sum over i of  x[i]         * u(0, i % 32768) * c(0, i // 32768)   mod 2**64
    word1 = sum over i of (x[i] >> 32)  * u(1, i % 32768) * c(1, i // 32768)   mod 2**64

``>>`` keeps the sign, ``u(g, p) = mix(2p + g) | 1``, ``c(g, q) = mix(2**40 + 2q + g) | 1`` and
``mix`` is the splitmix64 output function. The digest is ``word0`` and ``word1``, 16 lowercase hex
digits each. Zeroing foreign bytes commutes with the sum, so any partition adds up exactly, down to
single bytes. A change inside one word always changes ``word0`` (odd weights). A change that
touches several words, and in all of them no bit below bit ``b`` of either half, escapes with a
chance of about 2**-(63 - b): 2**-32 at worst, when only signs of float32 differ, 2**-63 when low
bits do (by reasoning, not by trial). ``word1`` is there because a product modulo 2**64 forgets what
the top bits of ``x`` were multiplied with. Name, dtype and global shape stand beside the digest and
are not part of it. It finds faults, not forgery.

In order: ``entry`` finds which part of the logical tensor this rank holds (from the placements of a
DTensor, without any communication), cuts it into contiguous ranges of the flattened tensor (a part
that has none, such as a column slab, is laid into rows of zeros one MiB at a time), and sums the
words of each range. ``project`` walks the same ranges with another table of weights.

Why 64-bit products and not an int8 matrix product: on the AVX2 CPU where both were measured (torch
2.13), ``torch._int_mm`` reached 0.03–0.08 GB/s and ``torch.dot`` of int64 up to 11 GB/s.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Runs = list[tuple[int, int]]
    """Ranges ``(start, length)`` of global indices along one dimension, in local order."""

Entry = list[Any]
"""``[dtype, global shape, offsets, sizes, digest hex]``, as written to a ``state`` fact."""

_MASK = (1 << 64) - 1
_CELL_WORDS = 32768
_CELL_ELEMENTS = 4096
_DIRECTIONS = 8
_COPY_BYTES = 1 << 20
_SPAN_ITEMS = 1 << 19
_LONG_RUN_BYTES = 128 << 10
_CELL_SALT = 1 << 40
_PROJECT_SALT = 1 << 41
_PROJECT_CELL_SALT = 1 << 42
_BIG_ROW_BYTES = 16 << 10
_INT_OF_ITEMSIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_tables: dict[tuple[str, torch.device], torch.Tensor] = {}


def entry(tensor: torch.Tensor) -> Entry:
    """Return ``[dtype, global shape, offsets, sizes, digest]`` of what this rank holds of `tensor`.

    A plain tensor holds all of itself: offsets are zeros. A DTensor holds its local shard. Offsets
    and sizes have one item per dimension. Where a shard is no slab (some strided placements), the
    offset of that dimension is the list of its ``[start, length]`` ranges instead of a number.
    Where the local values are no part of the logical tensor (a pending reduction, or a placement
    that is not known here), offsets are ``["partial", placements, mesh coordinate]``: the digest is
    then that of the local values alone and `combine` refuses to add it.

    Communicates with no other rank. Raises TypeError for a tensor without readable bytes (meta,
    sparse, quantized).
    """
    with torch.no_grad():
        local, shape, dim_runs, mark = _locate(tensor)
        result = _shard_entry(local, shape, dim_runs)
        if mark:
            result[1:3] = [[int(size) for size in tensor.shape], mark]
        return result


def flat_entry(flat: torch.Tensor, global_shape: Sequence[int], start: int) -> Entry:
    """Return the entry of elements ``start … start + numel`` of the flattened logical tensor.

    `flat` is a contiguous range of the row-major elements (a flat shard of ZeRO, FSDP1 or
    Megatron); it may be empty. Offsets and sizes are then one number each, in elements. Raises
    TypeError as `entry` does.
    """
    with torch.no_grad():
        local = _unwrap(flat).detach().reshape(-1)
        _require_bytes(local)
        size = local.numel()
        pieces = _pieces_of(local, (size,), [[(0, size)]], start)
        words = _sum_words(pieces, local.device)
        return [_dtype_name(local.dtype), list(global_shape), [start], [size], _hex(words)]


def combine(entries: Iterable[Sequence[Any]]) -> str:
    """Return the digest of the whole logical tensor from the entries of all ranks.

    Each distinct (offsets, sizes) counts once; of replicas the first is taken, so compare them
    before. Both 64-bit words are added modulo 2**64. ``"partial"`` if any entry is marked so.
    """
    distinct: dict[str, str] = {}
    for _, _, offsets, sizes, digest in entries:
        if offsets and offsets[0] == "partial":
            return "partial"
        distinct.setdefault(repr((list(offsets), list(sizes))), digest)
    first = sum(int(digest[:16], 16) for digest in distinct.values())
    second = sum(int(digest[16:], 16) for digest in distinct.values())
    return _hex((first, second))


def project(tensor: torch.Tensor) -> list[float]:
    """Return 8 pseudo-random ±1 projections (float64) of what this rank holds of `tensor`.

    The weight of an element depends on its index in the flattened logical tensor and the direction
    alone, so projections of distinct shards add up to that of the whole (to float64 rounding) in
    any layout, and two samples subtract. Complex values count as pairs of reals. A pending
    reduction is projected by its local values. Raises TypeError as `entry` does.
    """
    with torch.no_grad():
        local, shape, dim_runs, _ = _locate(tensor)
        _require_bytes(local)
        total = torch.zeros(_DIRECTIONS, dtype=torch.float64, device=local.device)
        for flat, start in _boxes(_reals(local), shape, dim_runs):
            for begin, end in _spans(start, flat.numel(), _CELL_ELEMENTS):
                total += _project_span(flat[begin:end].to(torch.float64), start + begin)
        return [float(value) for value in total.tolist()]


def row_hashes(batch: torch.Tensor) -> list[str]:
    """Return 16 hex digits per index of dimension 0 of `batch`, by content.

    Rows of integers and bools lose the length of their padding: a leading and a trailing run of one
    repeated value count as one element each, since the padded length depends on which samples were
    collated together. Rows of other dtypes count with their shape and every byte. Rows above
    16 KiB of those are hashed where they are (by the words of the fingerprint), others on the CPU.
    Raises TypeError as `entry` does.
    """
    with torch.no_grad():
        rows = _unwrap(batch).detach()
        _require_bytes(rows)
        rows = rows.reshape(1) if rows.dim() == 0 else rows
        name = _dtype_name(rows.dtype)
        if not (rows.is_floating_point() or rows.is_complex()):
            flat = _bits(rows).reshape(rows.shape[0], math.prod(rows.shape[1:]))
            return _collapsed_hashes(flat.cpu(), name)
        header = f"{name}{list(rows.shape[1:])}"
        if math.prod(rows.shape[1:]) * rows.element_size() <= _BIG_ROW_BYTES:
            return [_blake(header, _raw(row)) for row in rows.cpu().contiguous()]
        return [_blake(header, _hex(_whole_words(row)).encode()) for row in rows]


def self_test() -> str | None:
    """Return None if this build of torch sums exactly, else what did not.

    Compares both forms of the sum with plain Python integers. Takes a few milliseconds; draws no
    random numbers.
    """
    source = _mix_tensor(torch.arange(64, dtype=torch.int64)).view(torch.uint8)
    border = 8 * _CELL_WORDS - 40
    cases = (
        ("uneven 2-D float32", source[: 7 * 9 * 4].view(torch.float32).view(7, 9), 0),
        ("1-D bfloat16", source[:210].view(torch.bfloat16), 0),
        ("transposed int16", source[:70].view(torch.int16).view(5, 7).t(), 0),
        ("flat uint8 across two cells", source[:93], border),
        ("flat float64 across two cells", source.view(torch.float64), border // 8),
    )
    for title, tensor, start in cases:
        expected = _hex(_reference(_raw(tensor.contiguous()), start * tensor.element_size()))
        found = flat_entry(tensor, (1 << 20,), start) if start else entry(tensor)
        if found[4] != expected:
            return f"the fingerprint of a {title} tensor differs from the reference"
    words = source.view(torch.int64)
    if _hex(_device_words(words, border // 8).tolist()) != _hex(_reference(_raw(words), border)):
        return "the accelerator's form of the fingerprint differs from the reference"
    return None


def _shard_entry(local: torch.Tensor, shape: Sequence[int], dim_runs: Sequence[Runs]) -> Entry:
    """Return the entry of a local tensor which holds the given global ranges of each dimension."""
    _require_bytes(local)
    words = _sum_words(_pieces_of(local, shape, dim_runs), local.device)
    offsets = [_offset(runs) for runs in dim_runs]
    return [_dtype_name(local.dtype), list(shape), offsets, list(local.shape), _hex(words)]


def _locate(
    tensor: torch.Tensor,
) -> tuple[torch.Tensor, tuple[int, ...], list[Runs], list[Any] | None]:
    """Return the local tensor, the global shape, the ranges per dimension, and the partial mark."""
    placements = getattr(tensor, "placements", None)
    if placements is None or not hasattr(tensor, "_local_tensor"):
        local = _unwrap(tensor).detach()
        return local, tuple(local.shape), [[(0, size)] for size in local.shape], None
    local = _unwrap(tensor._local_tensor).detach()
    shape = tuple(int(size) for size in tensor.shape)
    mesh: Any = getattr(tensor, "device_mesh", None)
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        degrees = [int(mesh.size(dim)) for dim in range(len(placements))]
        for right_to_left in (True, False):
            runs = _dim_runs(shape, placements, degrees, coordinate, right_to_left=right_to_left)
            if runs is not None and [_length(run) for run in runs] == list(local.shape):
                return local, shape, runs, None
    if coordinate is None and local.numel() == 0:
        empty: list[Runs] = [[] for _ in local.shape]
        return local, shape, empty, None
    mark = ["partial", [str(placement) for placement in placements], list(coordinate or [])]
    return local, tuple(local.shape), [[(0, size)] for size in local.shape], mark


def _dim_runs(
    shape: Sequence[int],
    placements: Sequence[Any],
    degrees: Sequence[int],
    coordinate: Sequence[int],
    *,
    right_to_left: bool,
) -> list[Runs] | None:
    """Return the global ranges held along each dimension, None if a placement has none."""
    result: list[Runs] = [[(0, size)] for size in shape]
    splits: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for placement, degree, index in zip(placements, degrees, coordinate):
        dim = getattr(placement, "dim", None)
        if placement.is_replicate():
            continue
        if dim is None or placement.is_partial():
            return None
        factor = int(getattr(placement, "split_factor", 1))
        splits[dim].append((factor, degree, index))
    for dim, split in enumerate(splits):
        if right_to_left and _is_right_to_left(split):
            split = [(1, degree, index) for _, degree, index in reversed(split)]  # noqa: PLW2901
        for factor, degree, index in split:
            result[dim] = _strided_chunk(result[dim], factor, degree, index)
    return result


def _is_right_to_left(split: Sequence[tuple[int, int, int]]) -> bool:
    """Tell whether strided shards mean "the mesh dimensions to the right were split first".

    That is how FSDP2 over tensor parallelism is recorded. Where sizes do not divide, reading such
    placements from left to right moves rows to ranks that never held them.
    """
    later = 1
    for position, (factor, degree, _) in enumerate(reversed(split)):
        if factor != later and position > 0:
            return False
        if position == 0 and factor != 1:
            return False
        later *= degree
    return len(split) > 1


def _strided_chunk(runs: Runs, factor: int, degree: int, index: int) -> Runs:
    pieces = [_chunk(runs, factor, part) for part in range(factor)]
    return _merged([run for piece in pieces for run in _chunk(piece, degree, index)])


def _chunk(runs: Runs, degree: int, index: int) -> Runs:
    """Cut as `torch.chunk` does: equal pieces rounded up, the last ones short or empty."""
    total = _length(runs)
    size = -(-total // degree)
    low, high = min(index * size, total), min((index + 1) * size, total)
    result: Runs = []
    for start, length in runs:
        begin, end = max(low, 0), min(high, length)
        if begin < end:
            result.append((start + begin, end - begin))
        low, high = low - length, high - length
    return result


def _merged(runs: Runs) -> Runs:
    result: Runs = []
    for start, length in runs:
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return result


def _length(runs: Runs) -> int:
    return sum(length for _, length in runs)


def _offset(runs: Runs) -> Any:
    if len(runs) > 1:
        return [list(run) for run in runs]
    return runs[0][0] if runs else 0


def _unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor: the local shard of a DTensor, the awaited value of an async one."""
    inner: Any = getattr(tensor, "_local_tensor", tensor)
    wait = getattr(inner, "trigger_wait", None)
    result: torch.Tensor = wait() if wait is not None else inner
    return result


def _require_bytes(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        what = f"{tensor.layout}, {tensor.dtype} on {tensor.device}"
        raise TypeError(f"a tensor without readable bytes has no fingerprint: {what}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "", 1)


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex values as a last dimension of (real, imaginary), others as they are."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.resolve_neg()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits as integers: every device copies and views these, in every torch version."""
    reals = _reals(tensor)
    return reals.view(_INT_OF_ITEMSIZE[reals.element_size()])


def _pieces_of(
    local: torch.Tensor, shape: Sequence[int], dim_runs: Sequence[Runs], start: int = 0
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield ``(contiguous bytes, global byte offset)`` that together are the local shard.

    `start`, in elements, is added to every offset.
    """
    base = start * local.element_size()
    for flat, offset in _boxes(_bits(local), shape, dim_runs):
        yield flat.view(torch.uint8), base + offset * flat.element_size()


def _boxes(
    local: torch.Tensor, shape: Sequence[int], dim_runs: Sequence[Runs]
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield pieces of every box of the shard: one box, unless a dimension has several ranges."""
    extra = tuple(local.shape[len(dim_runs) :])
    yield from _cut(local, (*shape, *extra), dim_runs, [], 0)


def _cut(
    local: torch.Tensor,
    shape: tuple[int, ...],
    dim_runs: Sequence[Runs],
    offsets: list[int],
    dim: int,
) -> Iterator[tuple[torch.Tensor, int]]:
    if dim == len(dim_runs):
        yield from _pieces(local, shape, (*offsets, *[0] * (len(shape) - dim)))
        return
    position = 0
    for start, length in dim_runs[dim]:
        part = local if length == local.shape[dim] else local.narrow(dim, position, length)
        yield from _cut(part, shape, dim_runs, [*offsets, start], dim + 1)
        position += length


def _pieces(
    local: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], base: int = 0
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield ``(contiguous 1-D elements, global element offset)`` of one box of the tensor.

    A yielded tensor is valid until the next is asked for. A contiguous box is not copied.
    """
    if local.numel() == 0:
        return
    if local.dim() == 0:
        yield local.reshape(1), base
        return
    row = math.prod(shape[1:])
    base += offsets[0] * row
    full = tuple(local.shape[1:]) == shape[1:]
    if full and local.is_contiguous():
        yield local.view(-1), base
        return
    rows = _COPY_BYTES // (row * local.element_size())
    held = local[0].numel() * local.element_size()
    if rows == 0 or (not full and held >= _LONG_RUN_BYTES):
        for index in range(local.shape[0]):
            yield from _pieces(local[index], shape[1:], offsets[1:], base + index * row)
        return
    # Foreign elements of the rows stay zero, and zeros add nothing to any of the sums.
    block = local.new_zeros((min(rows, local.shape[0]), *shape[1:]))
    window = block
    for dim in range(1, local.dim()):
        window = window.narrow(dim, offsets[dim], local.shape[dim])
    for index in range(0, local.shape[0], rows):
        part = local[index : index + rows]
        window[: len(part)].copy_(part)
        yield block[: len(part)].view(-1), base + index * row


def _whole_words(tensor: torch.Tensor) -> tuple[int, int]:
    whole: list[Runs] = [[(0, size)] for size in tensor.shape]
    return _sum_words(_pieces_of(tensor, tuple(tensor.shape), whole), tensor.device)


def _sum_words(pieces: Iterable[tuple[torch.Tensor, int]], device: torch.device) -> tuple[int, int]:
    """Add up both words of all pieces; on an accelerator the sums stay there until the end."""
    first = second = 0
    remote: list[torch.Tensor] = []
    for data, start in pieces:
        for words, index in _aligned(data, start):
            if device.type == "cpu":
                low, high = _host_words(words, index)
                first, second = first + low, second + high
            else:
                remote.append(_device_words(words, index))
    if remote:
        low, high = torch.stack(remote).sum(0).tolist()
        return low, high
    return first, second


def _aligned(data: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield ``(int64 words, global word index)`` of bytes at a global byte offset.

    Bytes whose address and offset are both multiples of 8 are viewed, others go through a buffer.
    """
    size, phase = data.numel(), start % 8
    whole = 0
    if phase == 0 and data.storage_offset() % 8 == 0:
        whole = size - size % 8
        if whole:
            yield data[:whole].view(torch.int64), start // 8
    while whole < size:
        phase = (start + whole) % 8
        count = min(_COPY_BYTES - phase, size - whole)
        block = data.new_zeros(-(-(phase + count) // 8) * 8)
        block[phase : phase + count].copy_(data[whole : whole + count])
        yield block.view(torch.int64), (start + whole) // 8
        whole += count


def _host_words(words: torch.Tensor, index: int) -> tuple[int, int]:
    """Return both sums of int64 `words` on the CPU, not yet reduced modulo 2**64."""
    weights = _word_table(words.device)
    first = second = 0
    done, total = 0, words.numel()
    while done < total:
        cell, position = divmod(index + done, _CELL_WORDS)
        count = min(_CELL_WORDS - position, total - done)
        x = words if count == total else words[done : done + count]
        u = weights if count == _CELL_WORDS else weights[:, position : position + count]
        low, high = torch.dot(x, u[0]).item(), torch.dot(x >> 32, u[1]).item()
        first += int(low) * (_mix(_CELL_SALT + 2 * cell) | 1)
        second += int(high) * (_mix(_CELL_SALT + 2 * cell + 1) | 1)
        done += count
    return first, second


def _device_words(words: torch.Tensor, index: int) -> torch.Tensor:
    """Return both sums of int64 `words` as an int64 tensor [2] on their device.

    Elementwise products and sums only: every accelerator has those for int64, few have a dot.
    """
    weights = _word_table(words.device)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for begin, end in _spans(index, words.numel(), _CELL_WORDS):
        cell, position = divmod(index + begin, _CELL_WORDS)
        x = words[begin:end].view(-1, min(_CELL_WORDS, end - begin))
        u = weights[:, position : position + x.shape[1]]
        sums = torch.stack(((x * u[0]).sum(1), ((x >> 32) * u[1]).sum(1)))
        total += (sums * _cell_weights(cell, x.shape[0], words.device)).sum(1)
    return total


def _spans(start: int, count: int, cell: int) -> Iterator[tuple[int, int]]:
    """Cut ``0 … count`` at the borders of cells: a head, blocks of whole cells, a tail.

    Blocks hold at most 4 MiB of 8-byte items, which bounds the memory of the products.
    """
    done = 0
    while done < count:
        position = (start + done) % cell
        left = count - done
        if position or left < cell:
            step = min(cell - position, left)
        else:
            step = min(left - left % cell, _SPAN_ITEMS)
        yield done, done + step
        done += step


def _project_span(values: torch.Tensor, index: int) -> torch.Tensor:
    """Return the projections [8] of float64 `values`: part of one cell or several whole cells."""
    device = values.device
    cell, position = divmod(index, _CELL_ELEMENTS)
    x = values.view(-1, min(_CELL_ELEMENTS, values.numel()))
    signs = _sign_table(device)[:, position : position + x.shape[1]]
    cells = torch.arange(cell, cell + x.shape[0], dtype=torch.int64, device=device)
    return ((signs @ x.t()) * _signs(_PROJECT_CELL_SALT + cells)).sum(1)


def _word_table(device: torch.device) -> torch.Tensor:
    """Return the weights inside a cell, int64 [2, 32768], made once for each device."""
    key = ("words", device)
    if key not in _tables:
        index = torch.arange(2 * _CELL_WORDS, dtype=torch.int64, device=device)
        _tables[key] = (_mix_tensor(index) | 1).view(-1, 2).t().contiguous()
    return _tables[key]


def _sign_table(device: torch.device) -> torch.Tensor:
    """Return the signs inside a cell, float64 [8, 4096], made once for each device."""
    key = ("signs", device)
    if key not in _tables:
        index = torch.arange(_CELL_ELEMENTS, dtype=torch.int64, device=device)
        _tables[key] = _signs(_PROJECT_SALT + index).contiguous()
    return _tables[key]


def _cell_weights(cell: int, count: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(2 * cell, 2 * (cell + count), dtype=torch.int64, device=device)
    return (_mix_tensor(_CELL_SALT + index) | 1).view(-1, 2).t()


def _signs(index: torch.Tensor) -> torch.Tensor:
    """Return ±1 (float64 [8, n]) from the low bits of mixed indices."""
    directions = torch.arange(_DIRECTIONS, dtype=torch.int64, device=index.device)
    bits = (_mix_tensor(index).unsqueeze(0) >> directions.unsqueeze(1)) & 1
    return (1 - 2 * bits).to(torch.float64)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(index: int) -> int:
    """Return splitmix64 of `index`: 64 bits, unsigned."""
    z = (index + 1) * _GAMMA & _MASK
    z = (z ^ (z >> 30)) * _FIRST & _MASK
    z = (z ^ (z >> 27)) * _SECOND & _MASK
    return z ^ (z >> 31)


def _mix_tensor(index: torch.Tensor) -> torch.Tensor:
    """Return `_mix` of an int64 tensor, as signed int64."""
    z = (index + 1) * _signed(_GAMMA)
    z = (z ^ _logical_shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _logical_shift(z, 27)) * _signed(_SECOND)
    return z ^ _logical_shift(z, 31)


def _logical_shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _hex(words: Sequence[int]) -> str:
    return f"{words[0] & _MASK:016x}{words[1] & _MASK:016x}"


def _reference(raw: bytes, start: int) -> tuple[int, int]:
    """Return both words of bytes at byte offset `start` (a multiple of 8) in plain integers."""
    first = second = 0
    for offset in range(0, len(raw), 8):
        x = int.from_bytes(raw[offset : offset + 8].ljust(8, b"\0"), "little", signed=True)
        cell, position = divmod((start + offset) // 8, _CELL_WORDS)
        weight = _CELL_SALT + 2 * cell
        first += x * (_mix(2 * position) | 1) * (_mix(weight) | 1)
        second += (x >> 32) * (_mix(2 * position + 1) | 1) * (_mix(weight + 1) | 1)
    return first, second


def _raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous CPU tensor (numpy may be absent)."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _blake(header: str, raw: bytes) -> str:
    state = hashlib.blake2b(header.encode() + b"\0", digest_size=8)
    state.update(raw)
    return state.hexdigest()


def _collapsed_hashes(rows: torch.Tensor, name: str) -> list[str]:
    """Hash each row of an integer CPU tensor [n, m] without the length of its padding."""
    if rows.shape[1] == 0:
        return [_blake(name, b"")] * rows.shape[0]
    head = (rows == rows[:, :1]).to(torch.int8).cummin(1).values.sum(1).tolist()
    tail = (rows == rows[:, -1:]).flip(1).to(torch.int8).cummin(1).values.sum(1).tolist()
    rows = rows.contiguous()
    hashes = []
    for row, lead, trail in zip(rows, head, tail):
        end = max(rows.shape[1] - trail + 1, lead)
        hashes.append(_blake(name, _raw(row[lead - 1 : end])))
    return hashes
