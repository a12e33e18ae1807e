"""The digest must not depend on how a tensor is cut, and must depend on everything else.

First the definition against an independent reference, then every way to cut, then every way to
damage, then the hashes of rows and the projection, last real DTensors in real processes. Run as a
program, this file is one rank of that last test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptdrill.observer import fingerprint as fp

MASK = 2**64 - 1
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
SPLIT_DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.complex64]
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
few = settings(max_examples=40, deadline=None)


def splitmix(index: int) -> int:
    z = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def reference(raw: bytes) -> str:
    words = [0, 0]
    raw += bytes(-len(raw) % 8)
    for index in range(len(raw) // 8):
        x = int.from_bytes(raw[8 * index : 8 * index + 8], "little")
        cell, position = divmod(index, 32768)
        y = raw[8 * index + 4 : 8 * index + (12 if position < 32767 else 8)]
        for word, value in enumerate((x, int.from_bytes(y, "little"))):
            u = splitmix(2 * position + word) | 1
            words[word] += value * u * (splitmix(2**40 + 2 * cell + word) | 1)
    return f"{words[0] & MASK:016x}{words[1] & MASK:016x}"


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def random_tensor(shape: list[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    size = dtype.itemsize
    for length in shape:
        size *= length
    raw = random_bytes(size, seed)
    return (raw & 1).view(dtype).view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


def box(tensor: torch.Tensor, *ranges: tuple[int, int]) -> list:
    """Return the entry of the box ``[low, high)`` per dimension, as a shard of `tensor`."""
    local = tensor[tuple(slice(low, high) for low, high in ranges)].clone()
    runs = [[(low, high - low)] for low, high in ranges]
    return fp._shard_entry(local, tuple(tensor.shape), runs)


def digest(tensor: torch.Tensor) -> str:
    return fp.entry(tensor)[4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [[], [1], [13], [5, 3], [3, 5, 7]], ids=str)
def test_digest_is_the_documented_sum(dtype: torch.dtype, shape: list[int]) -> None:
    tensor = random_tensor(shape, dtype)
    raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    name = str(dtype).removeprefix("torch.")
    assert fp.entry(tensor) == [name, shape, [0] * len(shape), shape, reference(raw)]


def test_digest_is_the_documented_sum_across_cells() -> None:
    data = random_bytes(3 * 32768 * 8 + 11)
    assert digest(data) == reference(bytes(data.tolist()))


def test_extreme_bytes_are_summed_exactly() -> None:
    for value in (0x00, 0x7F, 0x80, 0xFF):
        data = torch.full((70_001,), value, dtype=torch.uint8)
        assert digest(data) == reference(bytes([value]) * 70_001)


@pytest.mark.parametrize("start", [0, 4, 40, 8 * 32767])
def test_accelerator_form_agrees_with_host_form(start: int) -> None:
    data = random_bytes(8 * (3 * 32768 + 77) + 5)
    host, device = [0, 0], [0, 0]
    for words, index, pitch in fp._ranges((data, (data.numel(),), (0,)), start):
        for word in range(2):
            host[word] += fp._host_words(words, index, pitch)[word]
            device[word] += fp._device_words(words, index).tolist()[word]
    assert fp._hex(host) == fp._hex(device) == fp._hex(fp._reference(fp._raw(data), start))


def test_self_test_passes_quickly() -> None:
    fp.self_test()
    began_s = time.perf_counter()
    assert fp.self_test() is None
    assert time.perf_counter() - began_s < 0.5


def test_self_test_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp, "_host_words", lambda *_: (1, 2))
    assert "float32" in str(fp.self_test())
    monkeypatch.undo()
    monkeypatch.setattr(fp, "_device_words", lambda *_: torch.zeros(2, dtype=torch.int64))
    assert "accelerator" in str(fp.self_test())


@few
@given(st.data(), SHAPES, st.sampled_from(SPLIT_DTYPES))
def test_any_grid_of_boxes_sums_to_the_whole(
    data: st.DataObject, shape: list[int], dtype: torch.dtype
) -> None:
    tensor = random_tensor(shape, dtype)
    grid: list[list[tuple[int, int]]] = [[]]
    for size in shape:
        cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))})
        pairs = list(pairwise(cuts))
        grid = [[*ranges, pair] for ranges in grid for pair in pairs]
    assert fp.combine([box(tensor, *ranges) for ranges in grid]) == digest(tensor)


@few
@given(st.data(), SHAPES, st.sampled_from(SPLIT_DTYPES))
def test_any_flat_split_sums_to_the_whole(
    data: st.DataObject, shape: list[int], dtype: torch.dtype
) -> None:
    tensor = random_tensor(shape, dtype)
    flat = tensor.reshape(-1)
    size = flat.numel()
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=4))), size]
    entries = [fp.flat_entry(flat[low:high], shape, low) for low, high in pairwise(cuts)]
    assert fp.combine(entries) == digest(tensor)
    assert all(found[1] == shape for found in entries)


@few
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_strided_shards_sum_to_the_whole(
    rows: int, factor: int, degree: int, by_columns: bool
) -> None:
    tensor = random_tensor([rows, 6], torch.bfloat16)
    tensor = tensor.t().contiguous() if by_columns else tensor
    dim = int(by_columns)
    entries = []
    for index in range(degree):
        runs = [[(0, size)] for size in tensor.shape]
        runs[dim] = fp._strided_chunk([(0, rows)], factor, degree, index)
        held = [start + step for start, length in runs[dim] for step in range(length)]
        local = tensor.index_select(dim, torch.tensor(held, dtype=torch.int64))
        entries.append(fp._shard_entry(local, tuple(tensor.shape), runs))
    assert fp.combine(entries) == digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_large_column_and_middle_shards_sum_to_the_whole(dtype: torch.dtype) -> None:
    wide = random_tensor([600, 3001], dtype)
    columns = [(0, 1), (1, 1500), (1500, 3001)]
    assert fp.combine([box(wide, (0, 600), pair) for pair in columns]) == digest(wide)
    long = random_tensor([2, 1_500_000], dtype)
    halves = [(0, 700_001), (700_001, 1_500_000)]
    assert fp.combine([box(long, (0, 2), pair) for pair in halves]) == digest(long)
    experts = random_tensor([3, 4, 50_000], dtype)
    middle = [box(experts, (0, 3), pair, (0, 50_000)) for pair in ((0, 3), (3, 4))]
    assert fp.combine(middle) == digest(experts)


@few
@given(
    st.integers(1, 90),
    st.sampled_from([1, 2, 3, 1000, 1280, 4097, 8192, 24576, 40000]),
    st.integers(0, 2**16),
    st.integers(1, 3),
)
def test_column_slabs_are_summed_where_they_lie(
    rows: int, pitch: int, seed: int, depth: int
) -> None:
    """Words [depth, rows, pitch]: few cells or many, periods of 1 to 32768 rows, any columns."""
    rows = min(rows, 400_000 // (pitch * depth) + 1)
    whole = random_tensor([depth, rows, pitch], torch.int64, seed)
    low = seed % pitch
    high = min(pitch, low + 1 + seed % 97)
    cuts = [pair for pair in ((0, low), (low, high), (high, pitch)) if pair[0] < pair[1]]
    parts = [whole[:, :, left:right].contiguous() for left, right in cuts]
    for part, (left, _) in zip(parts, cuts, strict=True):
        slab = fp._slab(part, (depth, rows, pitch), (0, 0, left))
        short = part.shape != whole.shape and part.shape[2] < 16384
        assert (slab is not None) == short
    boxes = [box(whole, (0, depth), (0, rows), pair) for pair in cuts]
    assert fp.combine(boxes) == digest(whole)


def test_views_that_begin_between_words_are_exact_and_stay_alive() -> None:
    data = random_bytes(300_000)
    raw = bytes(data.tolist())
    for begin in range(9):
        part = data[begin : 299_000 - begin]
        assert digest(part) == reference(raw[begin : 299_000 - begin])
    words = fp._words_at(data, 3, (1, 1000), 1000)
    del data, part
    assert fp._raw(words) == raw[3:8003]


def test_layout_in_memory_does_not_matter() -> None:
    tensor = random_tensor([40, 30, 20], torch.int16)
    assert digest(tensor.permute(2, 0, 1)) == digest(tensor.permute(2, 0, 1).contiguous())
    assert digest(tensor[::2, 1::3]) == digest(tensor[::2, 1::3].contiguous())
    big = random_tensor([700, 900], torch.float32)
    assert digest(big.t()) == digest(big.t().contiguous())
    expanded = torch.ones(1).expand(300, 400)
    assert digest(expanded) == digest(torch.ones(300, 400))
    value = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    assert digest(value.conj()) == digest(value.conj().resolve_conj())


def test_empty_tensors_have_a_zero_digest() -> None:
    assert fp.entry(torch.empty(0, 7)) == ["float32", [0, 7], [0, 0], [0, 7], "0" * 32]
    assert fp.flat_entry(torch.empty(0), [3, 3], 9) == ["float32", [3, 3], [9], [0], "0" * 32]


def test_replicas_count_once_and_partial_values_do_not_add() -> None:
    whole = fp.entry(torch.arange(6.0))
    assert fp.combine([whole, whole]) == whole[4]
    marked = ["float32", [6], ["partial", ["Partial(sum)"], [0]], [6], whole[4]]
    assert fp.combine([marked]) == "partial"


def test_tensors_without_bytes_are_refused() -> None:
    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(TypeError, match="without readable bytes"):
            fp.entry(tensor)


def test_no_global_random_state_is_drawn() -> None:
    before = torch.get_rng_state()
    fp.entry(torch.ones(9, 9))
    fp.project(torch.ones(9, 9))
    fp.self_test()
    assert torch.equal(before, torch.get_rng_state())


@few
@given(st.data(), SHAPES, st.sampled_from(SPLIT_DTYPES))
def test_any_bit_flip_changes_the_digest(
    data: st.DataObject, shape: list[int], dtype: torch.dtype
) -> None:
    tensor = random_tensor(shape, dtype)
    before = digest(tensor)
    raw = tensor.view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != before


def test_pairs_of_equal_bit_flips_do_not_cancel() -> None:
    tensor = random_tensor([64, 64], torch.float32)
    before = digest(tensor)
    words = tensor.view(-1).view(torch.int32)
    generator = torch.Generator().manual_seed(1)
    for bit in (0, 15, 16, 30, 31):
        for _ in range(40):
            pair = torch.randperm(4096, generator=generator)[:2]
            flip = -(2**31) if bit == 31 else 1 << bit
            words[pair] ^= flip
            assert digest(tensor) != before
            words[pair] ^= flip
    assert digest(tensor) == before


@few
@given(st.integers(2, 300), st.integers(2, 300), st.integers(0, 50))
def test_moved_rows_columns_and_shards_change_the_digest(
    rows: int, columns: int, seed: int
) -> None:
    tensor = random_tensor([rows, columns], torch.float32, seed)
    before = digest(tensor)
    assert digest(tensor.roll(1, 0)) != before
    assert digest(tensor.roll(1, 1)) != before
    assert digest(tensor.t()) != before
    half = rows // 2
    swapped = tensor.clone()
    swapped[:half], swapped[half : 2 * half] = tensor[half : 2 * half], tensor[:half]
    assert digest(swapped) != before


def test_zeros_and_nan_payloads_are_bitwise() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(nans[:1]) != digest(nans[1:])


def test_padding_of_integer_rows_does_not_count() -> None:
    rows = torch.tensor([[0, 0, 0, 5, 6, 6, 7, 1, 1], [0, 5, 6, 6, 7, 1, 1, 1, 1]])
    first, second = fp.row_hashes(rows)
    assert first == second
    assert fp.row_hashes(torch.tensor([[0, 5, 6, 7, 1]])) != [first]
    assert fp.row_hashes(torch.tensor([[4, 4, 4]])) == fp.row_hashes(torch.tensor([[4]]))
    assert fp.row_hashes(torch.tensor([4])) == fp.row_hashes(torch.tensor([[4, 4]]))
    assert fp.row_hashes(torch.tensor([[4, 4]])) != fp.row_hashes(torch.tensor([[4, 5]]))
    assert fp.row_hashes(rows) != fp.row_hashes(rows.int())
    assert fp.row_hashes(rows > 3)[0] == fp.row_hashes(rows > 3)[1]


@few
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_collapsing_keeps_the_core(row: list[int]) -> None:
    lead = next((i for i, v in enumerate(row) if v != row[0]), len(row))
    core = row[lead - 1 :]
    trail = next((i for i, v in enumerate(core[::-1]) if v != core[-1]), len(core))
    core = core[: len(core) - trail + 1]
    assert fp.row_hashes(torch.tensor([row])) == fp.row_hashes(torch.tensor([core]))
    padded = [row[0], *row, row[-1], row[-1]]
    assert fp.row_hashes(torch.tensor([row])) == fp.row_hashes(torch.tensor([padded]))


def test_every_byte_of_float_rows_counts() -> None:
    for columns in (5, 9000):
        rows = torch.zeros(3, columns)
        rows[1, -1] = -0.0
        found = fp.row_hashes(rows)
        assert found[0] == found[2] != found[1]
        assert all(len(item) == len(fp.row_hashes(torch.zeros(1))[0]) == 16 for item in found)
    assert fp.row_hashes(torch.zeros(1, 4)) != fp.row_hashes(torch.zeros(1, 5))
    assert fp.row_hashes(torch.zeros(0, 4)) == []
    assert fp.row_hashes(torch.zeros(0, 4, dtype=torch.int64)) == []
    assert len(fp.row_hashes(torch.zeros(2, 0, dtype=torch.int64))) == 2
    assert fp.row_hashes(torch.tensor([[1]], dtype=torch.uint16))


@few
@given(st.integers(1, 90), st.integers(1, 200), st.integers(0, 4))
def test_projection_adds_up_over_columns(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(rows, columns, generator=generator)
    cut = columns // 2
    parts = torch.zeros(8, dtype=torch.float64)
    for low, high in ((0, cut), (cut, columns)):
        pieces = fp._pieces(tensor[:, low:high], tuple(tensor.shape), (0, low))
        for flat, start in pieces:
            for begin, end in fp._spans(start, flat.numel(), 4096):
                parts += fp._project_span(flat[begin:end].double(), start + begin)
    torch.testing.assert_close(parts.tolist(), fp.project(tensor), rtol=1e-10, atol=1e-9)


def test_projection_estimates_the_norm_of_an_update() -> None:
    update = torch.full((300, 300), 0.01)
    update[::2] *= -1
    mean_square = sum(value**2 for value in fp.project(update)) / 8
    assert 0.2 < mean_square / float(update.double().square().sum()) < 3
    assert fp.project(torch.empty(0)) == [0.0] * 8


@pytest.mark.e2e
def test_real_dtensors_sum_to_the_unsharded_digest(tmp_path: Path) -> None:
    root = Path(fp.__file__).parents[2]
    ranks = []
    for rank in range(4):
        environment = {**os.environ, "RANK": str(rank), "PYTHONPATH": str(root)}
        command = [sys.executable, __file__, str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=environment))
    codes = [rank.wait(timeout=240) for rank in ranks]
    assert codes == [0, 0, 0, 0]
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for name, (whole, _) in facts[0].items():
        entries = [fact[name][1] for fact in facts]
        if name == "partial":
            assert [found[2][2] for found in entries] == [[0, 0], [0, 1], [1, 0], [1, 1]]
            assert fp.combine(entries) == "partial"
            continue
        assert fp.combine(entries) == whole, name
        assert {tuple(found[1]) for found in entries} == {tuple(entries[0][1])}
    assert any(0 in fact["empty"][1][3] for fact in facts)
    assert any(isinstance(fact["strided"][1][2][0], list) for fact in facts)
    assert len({repr(fact["fsdp_tp.0.weight"][1][2:4]) for fact in facts}) == 4


def _dtensor_entries() -> dict[str, tuple[str, list]]:
    """Return the digest of the unsharded tensor and this rank's entry for every kind of layout."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    table = random_tensor([257, 33], torch.bfloat16)
    layouts = {
        "rows": [Shard(0), Replicate()],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(0), Shard(1)],
        "rows_twice": [Shard(0), Shard(0)],
        "replicas": [Replicate(), Replicate()],
    }
    found = {}
    for name, placements in layouts.items():
        found[name] = (digest(table), fp.entry(distribute_tensor(table, mesh, placements)))
    short = table[:3].clone()
    sharded = distribute_tensor(short, mesh, [Shard(0), Shard(0)])
    found["empty"] = (digest(short), fp.entry(sharded))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    pieces = [chunk.chunk(2)[coordinate[0]] for chunk in torch.arange(257).chunk(4)]
    rows = torch.cat(pieces).tolist()
    local = DTensor.from_local(
        table[rows],
        mesh,
        [_StridedShard(0, split_factor=4), Replicate()],
        run_check=False,
        shape=table.shape,
        stride=table.stride(),
    )
    found["strided"] = (digest(table), fp.entry(local))
    pending = DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()], run_check=False)
    found["partial"] = ("", fp.entry(pending))
    return found | _fsdp_tp_entries(mesh)


def _fsdp_tp_entries(mesh: torch.distributed.device_mesh.DeviceMesh) -> dict[str, tuple[str, list]]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = torch.nn.Sequential(torch.nn.Linear(12, 9), torch.nn.ReLU(), torch.nn.Linear(9, 7))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(seed)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    whole = {name: digest(parameter) for name, parameter in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return {
        f"fsdp_tp.{name}": (whole[name], fp.entry(parameter))
        for name, parameter in model.named_parameters()
    }


def _rank_main(folder: Path) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=4)
    (folder / f"{rank}.json").write_text(json.dumps(_dtensor_entries()))
    dist.barrier()
    sys.stdout.flush()
    # Freeing gloo groups can hang after the work is done.
    os._exit(0)


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
