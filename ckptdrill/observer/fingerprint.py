"""Fingerprint a tensor shard by shard, so that every layout of it sums to one digest.

Checkpoints are resharded: the same parameter is a row slab here, a column slab there, a flat range
of a ZeRO buffer elsewhere. Comparing them must not gather anything. So the digest is a sum over the
row-major bytes of the *logical* tensor, each rank adds up the part that it holds, and whoever reads
the facts adds the ranks together.

Definition, complete. Let ``x[i]`` be the little-endian 64-bit word made of the bytes
``8i … 8i+7`` of the row-major logical tensor (bytes past the end, or held by another rank, are 0),
and ``y[i]`` the word of the bytes ``8i+4 … 8i+11``, of which those that belong to the next cell (of
32768 words) are taken as 0::

    word0 = sum over i of  x[i] * u(0, i % 32768) * c(0, i // 32768)   mod 2**64
    word1 = sum over i of  y[i] * u(1, i % 32768) * c(1, i // 32768)   mod 2**64

``u(g, p) = mix(2p + g) | 1``, ``c(g, q) = mix(2**40 + 2q + g) | 1`` and ``mix`` is the splitmix64
output function. The digest is ``word0`` and ``word1``, 16 lowercase hex digits each. Zeroing
foreign bytes commutes with the sum, so any partition adds up exactly, down to single bytes. A
change inside one word always changes ``word0`` (odd weights). A change that touches several words,
and in all of them no bit below bit ``b`` of either half, escapes with a chance of about
2**-(63 - b): 2**-32 at worst, when only signs of float32 differ, 2**-63 when low bits do (by
reasoning, not by trial). ``word1`` is there because a product modulo 2**64 forgets what the top
bits of ``x`` were multiplied with: they are the middle of ``y``. Name, dtype and global shape stand
beside the digest and are not part of it. It finds faults, not forgery.

In order: ``entry`` finds which part of the logical tensor this rank holds (from the placements of a
DTensor, without any communication) and cuts it into boxes. On the CPU, a box of short row pieces (a
column slab) is summed where it lies, the rows of one cell together. Any other box is cut into
contiguous ranges of the flattened tensor (one that has none is laid into rows of zeros, one MiB at
a time), and the words of each range are summed. ``project`` walks such ranges with another table
of weights.

Why 64-bit products and not an int8 matrix product: on the AVX2 CPU where both were measured (torch
2.13), ``torch._int_mm`` reached 0.03–0.08 GB/s and ``torch.mv`` of int64 9 GB/s. Why words that
straddle: ``y`` is read from the same memory 4 bytes further, while a shift would write a copy.
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
    Box = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]
    """Local values, the shape of the logical tensor, and where in it the values begin."""
    Slab = tuple[int, int, int]
    """Dimension along which a tensor is cut, where the slab begins along it, and its length."""
    Part = tuple[torch.Tensor, Sequence[int], Sequence[Runs], int]
    """Local values, the shape that they are part of, their ranges in it, and where that begins."""

Entry = list[Any]
"""``[dtype, global shape, offsets, sizes, digest hex]``, as written to a ``state`` fact."""

_MASK = (1 << 64) - 1
_CELL_WORDS = 32768
_CELL_ELEMENTS = 4096
_DIRECTIONS = 8
_COPY_BYTES = 1 << 20
_SPAN_ITEMS = 1 << 19
_LONG_RUN_BYTES = 128 << 10
_FEW_CELLS = 8
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

    A tensor subclass that is made of others (low-bit optimizer state, say) has no bytes of its own:
    its digest is a hash of the entries of those, and equal for equal ones, not one that adds up.

    Communicates with no other rank. Raises TypeError for a tensor without readable bytes (meta,
    sparse, quantized).
    """
    with torch.no_grad():
        made_of = components(tensor)
        if made_of:
            return _composite_entry(tensor, made_of)
        local, shape, dim_runs, mark = _locate(tensor)
        result = _shard_entry(local, shape, dim_runs)
        if mark:
            whole = shape if is_sharded(tensor) else tensor.shape
            result[1:3] = [[int(size) for size in whole], mark]
        return result


def components(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that a subclass is made of, by name; empty for every other tensor, and for
    those of torch.distributed, which hold a part of a tensor or wait for one.
    """
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None or hasattr(tensor, "_local_tensor") or hasattr(tensor, "trigger_wait"):
        return {}
    parts = {name: getattr(tensor, name) for name in flatten(tensor)[0]}
    return {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}


def _composite_entry(tensor: torch.Tensor, made_of: dict[str, torch.Tensor]) -> Entry:
    text = repr((type(tensor).__name__, [(name, entry(part)) for name, part in made_of.items()]))
    shape = [int(size) for size in tensor.shape]
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return [_dtype_name(tensor.dtype), shape, [0 for _ in shape], shape, digest]


def flat_entry(
    flat: torch.Tensor, global_shape: Sequence[int], start: int, slab: Slab | None = None
) -> Entry:
    """Return the entry of elements ``start … start + numel`` of the flattened logical tensor.

    `flat` is a contiguous range of the row-major elements (a flat shard of ZeRO, FSDP1 or
    Megatron); it may be empty. With a `slab` it is a range of the elements of that slab. Offsets
    and sizes are then one number each, in elements, and with a slab a second one: where along its
    dimension the slab begins, and 1. Raises TypeError as `entry` does.
    """
    with torch.no_grad():
        local = _unwrap(flat).detach().reshape(-1)
        _require_bytes(local)
        words = [0, 0]
        for part, shape, runs, base in _ranges_of_slab(local, global_shape, start, slab):
            words = [a + b for a, b in zip(words, _sum_words(part, shape, runs, base))]
        offsets, sizes = ([start], [local.numel()])
        if slab is not None:
            offsets, sizes = [start, slab[1]], [local.numel(), 1]
        return [_dtype_name(local.dtype), list(global_shape), offsets, sizes, _hex(words)]


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
        return _project_parts(local.device, [(local, shape, dim_runs, 0)])


def square(local: torch.Tensor) -> float:
    """Return the sum of the squares of plain floating-point values, in float64.

    Sums of distinct parts add up to that of the whole, wherever they belong.
    """
    if not local.numel():
        return 0.0
    norm = torch.linalg.vector_norm(local.detach(), dtype=torch.float64)
    return float(norm) ** 2


def flat_project(
    flat: torch.Tensor, global_shape: Sequence[int], start: int, slab: Slab | None = None
) -> list[float]:
    """Return the `project` of what `flat_entry` is the entry of."""
    with torch.no_grad():
        local = _unwrap(flat).detach().reshape(-1)
        _require_bytes(local)
        return _project_parts(local.device, _ranges_of_slab(local, global_shape, start, slab))


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


def shorter_row_hashes(batch: torch.Tensor) -> tuple[list[str], list[list[str]]]:
    """Return `row_hashes`, and for each row of integers the hashes of it without its last element
    and without its last two; the second list is empty for other dtypes.

    A row that is padded in one batch ends in an element of the padding, and `tokens[:, :-1]` cuts
    either that or the last token: by these it is known again. Raises TypeError as `entry` does.
    """
    with torch.no_grad():
        rows = _unwrap(batch).detach()
        if rows.dim() < 2 or rows.is_floating_point() or rows.is_complex():
            return row_hashes(batch), []
        _require_bytes(rows)
        flat = _bits(rows).reshape(rows.shape[0], math.prod(rows.shape[1:]))
        found = _hashes_from_the_end(flat.cpu(), _dtype_name(rows.dtype))
        return [each[0] for each in found], [each[1:] for each in found]


def self_test() -> str | None:
    """Return None if this build of torch sums exactly, else what did not.

    Compares every form of the sum with plain Python integers. Takes a few milliseconds; draws no
    random numbers.
    """
    source = _mix_tensor(torch.arange(64, dtype=torch.int64)).view(torch.uint8)
    border = 8 * _CELL_WORDS - 40
    cases = (
        ("uneven 2-D float32", source[: 7 * 9 * 4].view(torch.float32).view(7, 9), 0),
        ("1-D bfloat16", source[:210].view(torch.bfloat16), 0),
        ("transposed int16", source[:70].view(torch.int16).view(5, 7).t(), 0),
        ("flat uint8 across two cells", source[:93], border + 3),
        ("flat float64 across two cells", source.view(torch.float64), border // 8),
    )
    for title, tensor, start in cases:
        expected = _hex(_reference(_raw(tensor.contiguous()), start * tensor.element_size()))
        found = flat_entry(tensor, (1 << 20,), start) if start else entry(tensor)
        if found[4] != expected:
            return f"the fingerprint of a {title} tensor differs from the reference"
    if not all(_slab_is_exact(source[:480].view(20, 24), 8 * left) for left in (2, 8190)):
        return "the fingerprint of a column slab differs from the reference"
    pieces = _ranges((source, (512,), (0,)), border)
    sums = torch.stack([_device_words(words, index) for words, index, _ in pieces]).sum(0)
    if _hex(sums.tolist()) != _hex(_reference(_raw(source), border)):
        return "the accelerator's form of the fingerprint differs from the reference"
    return None


def _slab_is_exact(slab: torch.Tensor, left: int) -> bool:
    """Compare the sums of bytes [rows, width] from column `left` of rows of 3/4 cell on."""
    pitch = 6 * _CELL_WORDS
    found = _shard_entry(slab, (len(slab), pitch), [[(0, len(slab))], [(left, slab.shape[1])]])
    sums = [_reference(_raw(row), left + index * pitch) for index, row in enumerate(slab)]
    return bool(found[4] == _hex((sum(low for low, _ in sums), sum(high for _, high in sums))))


def _shard_entry(local: torch.Tensor, shape: Sequence[int], dim_runs: Sequence[Runs]) -> Entry:
    """Return the entry of a local tensor which holds the given global ranges of each dimension."""
    _require_bytes(local)
    words = _sum_words(local, shape, dim_runs)
    offsets = [_offset(runs) for runs in dim_runs]
    return [_dtype_name(local.dtype), list(shape), offsets, list(local.shape), _hex(words)]


def _ranges_of_slab(
    flat: torch.Tensor, shape: Sequence[int], start: int, slab: Slab | None
) -> Iterator[Part]:
    """Yield the parts of a range of a slab: what is left of its first row, whole rows, the rest.

    Without a slab the range is one part, and so it is in a slab of whole rows.
    """
    size = flat.numel()
    dim, offset, length = slab or (0, 0, 0)
    inner = math.prod(shape[dim + 1 :]) if slab else 1
    width, pitch, left = length * inner, (math.prod(shape[dim:]) if slab else 0), offset * inner
    if slab is None or dim == 0:
        yield flat, (size,), [[(0, size)]], start + left
        return
    head = min(-start % width, size)
    rows = (size - head) // width
    body = head + rows * width
    for begin, end in ((0, head), (body, size)):
        row, column = divmod(start + begin, width)
        yield flat[begin:end], (end - begin,), [[(0, end - begin)]], row * pitch + left + column
    if rows:
        first = (start + head) // width
        runs = [[(first, rows)], [(left, width)]]
        yield flat[head:body].view(rows, width), (first + rows, pitch), runs, 0


def _locate(
    tensor: torch.Tensor,
) -> tuple[torch.Tensor, tuple[int, ...], list[Runs], list[Any] | None]:
    """Return the local tensor, the global shape, the ranges per dimension, and the partial mark."""
    if components(tensor):
        raise TypeError(f"a {type(tensor).__name__} is made of other tensors")
    if is_sharded(tensor):
        return _locate_shard(tensor)
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


def is_sharded(tensor: Any) -> bool:
    """Tell whether it is a ShardedTensor, as FSDP1 saves without a device mesh.

    Next to nothing of a tensor can be asked of one, not even its number of elements.
    """
    return hasattr(type(tensor), "local_shards")


def _locate_shard(
    tensor: Any,
) -> tuple[torch.Tensor, tuple[int, ...], list[Runs], list[Any] | None]:
    """As `_locate`. A rank has one shard, or none; several are not added up."""
    about, shards = tensor.metadata(), tensor.local_shards()
    shape = tuple(int(size) for size in about.size)
    if not shards:
        nothing = torch.empty([0 for _ in shape], dtype=about.tensor_properties.dtype)
        return nothing, shape, [[] for _ in shape], None
    place, local = shards[0].metadata, _unwrap(shards[0].tensor).detach()
    runs = [[(int(o), int(s))] for o, s in zip(place.shard_offsets, place.shard_sizes)]
    mark = None if len(shards) == 1 else ["partial", [f"{len(shards)} shards"], []]
    return local, shape, runs, mark


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


def _boxes(local: torch.Tensor, shape: Sequence[int], dim_runs: Sequence[Runs]) -> Iterator[Box]:
    """Yield every box of the shard: one, unless a dimension has several ranges."""
    extra = tuple(local.shape[len(dim_runs) :])
    yield from _cut(local, (*shape, *extra), dim_runs, ())


def _cut(
    local: torch.Tensor,
    shape: tuple[int, ...],
    dim_runs: Sequence[Runs],
    offsets: tuple[int, ...],
) -> Iterator[Box]:
    dim = len(offsets)
    if dim == len(dim_runs):
        yield local, shape, (*offsets, *[0] * (len(shape) - dim))
        return
    position = 0
    for start, length in dim_runs[dim]:
        part = local if length == local.shape[dim] else local.narrow(dim, position, length)
        yield from _cut(part, shape, dim_runs, (*offsets, start))
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
    return _sum_words(tensor, tuple(tensor.shape), [[(0, size)] for size in tensor.shape])


def _sum_words(
    local: torch.Tensor, shape: Sequence[int], dim_runs: Sequence[Runs], start: int = 0
) -> tuple[int, int]:
    """Add up both words of a shard; on an accelerator the sums stay there until the end.

    `start`, in elements, is added to the index of every element.
    """
    first = second = 0
    base = start * local.element_size()
    remote: list[torch.Tensor] = []
    for box in _boxes(_bits(local), shape, dim_runs):
        slab = _slab(*box) if local.device.type == "cpu" else None
        for words, index, pitch in [slab] if slab else _ranges(box, base):
            if local.device.type == "cpu":
                low, high = _host_words(words, index, pitch)
                first, second = first + low, second + high
            else:
                remote.append(_device_words(words, index))
    if remote:
        first, second = torch.stack(remote).sum(0).tolist()
    return first, second


def _slab(
    local: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]
) -> tuple[torch.Tensor, int, int] | None:
    """Return a box of short row pieces as ``(int64 [rows, width], global word index, pitch)``.

    The pitch is the number of words from one row to the next in the logical tensor. None if the
    rows are whole, long, not contiguous, not equally far apart or not made of whole words.
    """
    partial = [dim for dim, size in enumerate(local.shape) if size != shape[dim]]
    lead = partial[-1] if partial else 0
    if lead == 0 or partial[:-1] not in ([], [0]) or not local.is_contiguous():
        return None
    row, pitch = math.prod(local.shape[lead:]), math.prod(shape[lead:])
    offset = offsets[0] * math.prod(shape[1:]) + offsets[lead] * math.prod(shape[lead + 1 :])
    width, start, pitch = (size * local.element_size() for size in (row, offset, pitch))
    if local.numel() == 0 or width >= _LONG_RUN_BYTES or (width | start | pitch) % 8:
        return None
    at = int(local.storage_offset()) * local.element_size()
    words = _words_at(local, at, (local.numel() // row, width // 8), width // 8)
    return words, start // 8, pitch // 8


def _ranges(box: Box, base: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield ``(int64 [rows, width], global word index, width)`` of the contiguous ranges of a box.

    `base`, in bytes, is where the logical tensor of the box begins.
    """
    for flat, offset in _pieces(*box):
        for words, index in _aligned(flat.view(torch.uint8), base + offset * flat.element_size()):
            count = words.numel()
            # A product with a matrix on the CPU needs no memory, so the longer the better.
            limit = count if words.device.type == "cpu" else _SPAN_ITEMS
            for begin, end in _spans(index, count, _CELL_WORDS, limit):
                part = words if end - begin == count else words[begin:end]
                width = min(_CELL_WORDS, end - begin)
                yield part.view(-1, width), index + begin, width


def _aligned(data: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield ``(int64 words, global word index)`` of bytes at a global byte offset.

    Whole words are viewed where they lie, copied only on an accelerator that needs them at
    multiples of 8. Words that are partly foreign are padded with zeros.
    """
    size = data.numel()
    head = min(-start % 8, size)
    tail = head + (size - head) // 8 * 8
    if head:
        yield _padded(data[:head], start % 8), start // 8
    if head < tail:
        whole = data if tail - head == size else data[head:tail]
        yield from ((words, (start + head + at) // 8) for words, at in _viewed(whole))
    if tail < size:
        yield _padded(data[tail:], 0), (start + tail) // 8


def _viewed(data: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield ``(int64 words, byte offset in data)`` of bytes that are whole words."""
    if data.storage_offset() % 8 == 0:
        yield data.view(torch.int64), 0
    elif data.device.type == "cpu":
        count = data.numel() // 8
        yield _words_at(data, int(data.storage_offset()), (1, count), count).view(-1), 0
    else:
        for begin in range(0, data.numel(), _COPY_BYTES):
            yield data[begin : begin + _COPY_BYTES].clone().view(torch.int64), begin


def _padded(data: torch.Tensor, phase: int) -> torch.Tensor:
    """Return one int64 word that holds up to 8 bytes from byte `phase` on, else zeros."""
    block = data.new_zeros(8)
    block[phase : phase + data.numel()].copy_(data)
    return block.view(torch.int64)


def _words_at(
    memory: torch.Tensor, start: int, shape: tuple[int, int], stride: int
) -> torch.Tensor:
    """Return int64 words [rows, width] from any byte of the storage of a CPU tensor on, as a view.

    `stride`, in words, separates rows. A slice of a storage keeps the storage alive; a view of a
    tensor could not begin between two elements.
    """
    size = 8 * ((shape[0] - 1) * stride + shape[1])
    part = memory.untyped_storage()[start : start + size]
    return torch.empty(0, dtype=torch.int64).set_(part, 0, shape, (stride, 1))


def _host_words(words: torch.Tensor, index: int, pitch: int) -> tuple[int, int]:
    """Return both sums of int64 `words` [rows, width] on the CPU, not reduced modulo 2**64.

    The first word has the global index `index`; rows are contiguous here and `pitch` words apart in
    the logical tensor. Rows repeat their positions inside a cell with a period, so what one period
    has in one cell is summed for all periods at once.
    """
    rows, width = words.shape
    if rows == 1 and index % _CELL_WORDS + width <= _CELL_WORDS:
        return _run_words(words, index)
    period = _CELL_WORDS // math.gcd(_CELL_WORDS, pitch)
    whole = rows - rows % period
    # The first and last words of rows are copied, so there is a limit to the rows of one product.
    step = max(_SPAN_ITEMS // period, 1) * period
    blocks = [(begin, min(begin + step, whole), period) for begin in range(0, whole, step)]
    first = second = 0
    for begin, end, count in (*blocks, (whole, rows, rows - whole)):
        if begin == end:
            continue
        groups = words[begin:end].view(-1, count, width)
        start = index + begin * pitch
        for row, row_end, left, right in _parts(start, count, width, pitch):
            cell, position = divmod(start + row * pitch + left, _CELL_WORDS)
            sums = _group_sums(groups[:, row:row_end, left:right], position, pitch)
            low, high = _weighed(sums, cell, count * pitch // _CELL_WORDS)
            first, second = first + low, second + high
    return first, second


def _run_words(words: torch.Tensor, index: int) -> tuple[int, int]:
    """Return both sums of int64 [1, n] inside one cell, in few operations (the common case)."""
    cell, position = divmod(index, _CELL_WORDS)
    count = words.numel()
    table = _word_table(words.device)
    u = table.as_strided((count,), (1,), position + 1)
    first = int(torch.mv(words, u).item())
    second = _half(words, 2 * count - 1) * (_mix(2 * (position + count) - 1) | 1)
    if position:
        second += (_half(words, 0) << 32) * (_mix(2 * position - 1) | 1)
    if count > 1:
        v = table.as_strided((count - 1,), (1,), _CELL_WORDS + 2 + position)
        y = _words_at(words, 8 * int(words.storage_offset()) + 4, (1, count - 1), count)
        second += int(torch.mv(y, v).item())
    salt = _CELL_SALT + 2 * cell
    return first * (_mix(salt) | 1), second * (_mix(salt + 1) | 1)


def _half(words: torch.Tensor, position: int) -> int:
    """Return the unsigned 32-bit word at `position` of contiguous CPU memory."""
    return int(ctypes.c_uint32.from_address(words.data_ptr() + 4 * position).value)


def _parts(start: int, rows: int, width: int, pitch: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut rows ``pitch`` words apart into ``(row, row end, left, right)``, each inside one cell."""
    row = 0
    while row < rows:
        room = _CELL_WORDS - (start + row * pitch) % _CELL_WORDS
        if room < width:
            yield row, row + 1, 0, room
            yield row, row + 1, room, width
            row += 1
        else:
            count = min((room - width) // pitch + 1, rows - row)
            yield row, row + count, 0, width
            row += count


def _group_sums(block: torch.Tensor, position: int, pitch: int) -> torch.Tensor:
    """Return both sums of int64 [groups, rows, width] as int64 [2, groups].

    The weights of cells are not in them. Each group lies inside one cell, its rows `pitch` words
    apart from `position` on. A row of `y` begins one word before that of `x`; its first and last
    word are each half foreign.
    """
    groups, rows, width = block.shape
    table = _word_table(block.device)
    u, v, before = (
        table.as_strided((rows, width), (pitch, 1), offset + position)
        for offset in (1, _CELL_WORDS + 2, _CELL_WORDS + 1)
    )
    stride, count = block.stride(0), rows * width
    first = torch.mv(block.as_strided((groups, count), (stride, 1)), u.reshape(-1))
    second = torch.mv(_logical_shift(block[:, :, -1], 32), v[:, -1])
    second += torch.mv(block[:, :, 0] << 32, before[:, 0])
    if count > 1:
        inner = v.clone() if rows > 1 else v
        if rows > 1:
            inner[:, -1] = 0
        at = 8 * int(block.storage_offset()) + 4
        second += torch.mv(
            _words_at(block, at, (groups, count - 1), stride), inner.reshape(-1)[:-1]
        )
    return torch.stack((first, second))


def _weighed(sums: torch.Tensor, cell: int, step: int) -> tuple[int, int]:
    """Return the sums [2, n] of cells ``cell, cell + step, …`` times the weights of the cells."""
    count = sums.shape[1]
    if count > _FEW_CELLS:
        low, high = (sums * _cell_weights(cell, count, step, sums.device)).sum(1).tolist()
        return low, high
    salts = [_CELL_SALT + 2 * (cell + group * step) for group in range(count)]
    lows, highs = sums.tolist()
    first = sum(low * (_mix(salt) | 1) for low, salt in zip(lows, salts))
    return first, sum(high * (_mix(salt + 1) | 1) for high, salt in zip(highs, salts))


def _device_words(words: torch.Tensor, index: int) -> torch.Tensor:
    """Return both sums of int64 `words` [cells, width] as an int64 tensor [2] on their device.

    One row may be part of a cell; several are whole cells. Elementwise products and sums only:
    every accelerator has those for int64, few have a matrix product.
    """
    cell, position = divmod(index, _CELL_WORDS)
    table = _word_table(words.device)
    u, v = table[:, position + 1 : position + 1 + words.shape[1]]
    y = _logical_shift(words, 32)
    y[:, :-1] += words[:, 1:] << 32
    high = (y * v).sum(1) + (words[:, 0] << 32) * table[1, position]
    sums = torch.stack(((words * u).sum(1), high))
    return (sums * _cell_weights(cell, words.shape[0], 1, words.device)).sum(1)


def _spans(
    start: int, count: int, cell: int, limit: int = _SPAN_ITEMS
) -> Iterator[tuple[int, int]]:
    """Cut ``0 … count`` at the borders of cells: a head, blocks of whole cells, a tail.

    Blocks hold at most `limit` items (default 4 MiB of 8-byte items, where products take memory).
    """
    done = 0
    while done < count:
        position = (start + done) % cell
        left = count - done
        if position or left < cell:
            step = min(cell - position, left)
        else:
            step = min(left, limit) // cell * cell
        yield done, done + step
        done += step


def _project_parts(device: torch.device, parts: Iterable[Part]) -> list[float]:
    total = torch.zeros(_DIRECTIONS, dtype=torch.float64, device=device)
    for local, shape, dim_runs, base in parts:
        each = 2 if local.is_complex() else 1
        for box in _boxes(_reals(local), shape, dim_runs):
            for flat, offset in _pieces(*box):
                start = each * base + offset
                for begin, end in _spans(start, flat.numel(), _CELL_ELEMENTS):
                    total += _project_span(flat[begin:end].to(torch.float64), start + begin)
    return [float(value) for value in total.tolist()]


def _project_span(values: torch.Tensor, index: int) -> torch.Tensor:
    """Return the projections [8] of float64 `values`: part of one cell or several whole cells."""
    device = values.device
    cell, position = divmod(index, _CELL_ELEMENTS)
    x = values.view(-1, min(_CELL_ELEMENTS, values.numel()))
    signs = _sign_table(device)[:, position : position + x.shape[1]]
    cells = torch.arange(cell, cell + x.shape[0], dtype=torch.int64, device=device)
    return ((signs @ x.t()) * _signs(_PROJECT_CELL_SALT + cells)).sum(1)


def _word_table(device: torch.device) -> torch.Tensor:
    """Return the weights inside a cell, int64 [2, 1 + 32768], made once for each device.

    Column 0 is zero: it stands for the last word of the cell before.
    """
    key = ("words", device)
    if key not in _tables:
        index = torch.arange(2 * _CELL_WORDS, dtype=torch.int64, device=device)
        weights = (_mix_tensor(index) | 1).view(-1, 2).t()
        _tables[key] = torch.cat((torch.zeros_like(weights[:, :1]), weights), 1).contiguous()
    return _tables[key]


def _sign_table(device: torch.device) -> torch.Tensor:
    """Return the signs inside a cell, float64 [8, 4096], made once for each device."""
    key = ("signs", device)
    if key not in _tables:
        index = torch.arange(_CELL_ELEMENTS, dtype=torch.int64, device=device)
        _tables[key] = _signs(_PROJECT_SALT + index).contiguous()
    return _tables[key]


def _cell_weights(cell: int, count: int, step: int, device: torch.device) -> torch.Tensor:
    """Return the weights (int64 [2, count]) of cells ``cell, cell + step, …``."""
    cells = cell + step * torch.arange(count, dtype=torch.int64, device=device)
    groups = torch.arange(2, dtype=torch.int64, device=device).unsqueeze(1)
    return _mix_tensor(_CELL_SALT + 2 * cells + groups) | 1


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
    """Return both words of bytes at byte offset `start` in plain integers."""
    first = second = 0
    padded = bytes(8 + start % 8) + raw + bytes(16)
    for offset in range(0, start % 8 + len(raw) + 8, 8):
        cell, position = divmod((start + offset) // 8 - 1, _CELL_WORDS)
        end = offset + (12 if position < _CELL_WORDS - 1 else 8)
        x = int.from_bytes(padded[offset : offset + 8], "little")
        y = int.from_bytes(padded[offset + 4 : end], "little")
        weight = _CELL_SALT + 2 * cell
        first += x * (_mix(2 * position) | 1) * (_mix(weight) | 1)
        second += y * (_mix(2 * position + 1) | 1) * (_mix(weight + 1) | 1)
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
    return [each[0] for each in _hashes_from_the_end(rows, name, shorter=0)]


def _hashes_from_the_end(rows: torch.Tensor, name: str, shorter: int = 2) -> list[list[str]]:
    """For each row of an integer CPU tensor [n, m] its hash without the length of its padding, and
    those of what is left without the last element, the last two …: as many as leave two elements.
    """
    if rows.shape[1] == 0:
        return [[_blake(name, b"")] for _ in range(rows.shape[0])]
    head = (rows == rows[:, :1]).to(torch.int8).cummin(1).values.sum(1).tolist()
    tail = (rows == rows[:, -1:]).flip(1).to(torch.int8).cummin(1).values.sum(1).tolist()
    rows = rows.contiguous()
    size = rows.element_size()
    found = []
    for row, lead, trail in zip(rows, head, tail):
        raw = _raw(row[lead - 1 : max(rows.shape[1] - trail + 1, lead)])
        fewer = min(shorter, max(len(raw) // size - 2, 0))
        ends = [len(raw) - n * size for n in range(fewer, -1, -1)]
        state = hashlib.blake2b(name.encode() + b"\0", digest_size=8)
        hashes, begin = [], 0
        for end in ends:  # the shortest first, so that each is gone through once
            state.update(raw[begin:end])
            hashes.append(state.copy().hexdigest())
            begin = end
        found.append(hashes[::-1])
    return found
