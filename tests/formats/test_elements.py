"""Elements of a tensor are the same however it is cut, turned or laid out flat."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptdrill.errors import UserError
from ckptdrill.formats import dcp, elements, torch_save
from ckptdrill.formats.layout import Chunk, TensorMeta

torch = pytest.importorskip("torch")
samples = pytest.importorskip("tests.formats.samples")


def whole(root: Path, tensor: TensorMeta, limit: int = 7) -> bytes:
    """All elements, read in small blocks."""
    found = elements.Elements(root, tensor)
    return b"".join(found.block(b).tobytes() for b in elements.blocks(tensor.shape, limit))


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.integers(1, 9))
def test_blocks_are_boxes_in_row_major_order_that_leave_nothing_out(
    shape: tuple[int, ...], limit: int
) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    position = 0
    for block in elements.blocks(shape, limit):
        box = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.sizes, strict=True))
        assert block.start == position
        assert block.elements <= limit
        assert list(numbers[box].flat) == list(range(position, position + block.elements))
        position += block.elements
    assert position == math.prod(shape)


@pytest.mark.parametrize(("ranks", "axis"), list(itertools.product((1, 2, 3, 5), (0, 1))))
def test_shards_of_any_cut_give_the_same_bytes(tmp_path: Path, ranks: int, axis: int) -> None:
    tensors = {
        "matrix": torch.randn(7, 5),
        "cube": torch.arange(2 * 9 * 3, dtype=torch.int64).reshape(2, 9, 3),
        "vector": torch.randn(11).bfloat16(),
        "scalar": torch.tensor([2.5]),
    }
    samples.dcp_sharded(tmp_path / "c", tensors, ranks, axis)
    found = dcp.read(tmp_path / "c").tensors
    for name, tensor in tensors.items():
        wanted = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        for limit in (1, 4, 1000):
            assert whole(tmp_path / "c", found[name], limit) == wanted


def test_a_transposed_tensor_is_turned(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    torch.save({"t": base.permute(2, 0, 1), "plain": base}, tmp_path / "a.pt")
    found = torch_save.read(tmp_path / "a.pt")
    assert found["t"].strides == (1, 12, 4)
    assert whole(tmp_path, found["t"]) == base.permute(2, 0, 1).contiguous().numpy().tobytes()
    assert whole(tmp_path, found["plain"]) == base.numpy().tobytes()


def test_runs_of_a_flat_tensor_are_joined(tmp_path: Path) -> None:
    numbers = np.arange(15, dtype="<f4")
    (tmp_path / "one").write_bytes(b"head" + numbers[:9].tobytes())
    (tmp_path / "two").write_bytes(numbers[9:].tobytes() + b"tail")
    runs = (Chunk((0,), (9,), "one", 4, 36), Chunk((9,), (6,), "two", 0, 24))
    tensor = TensorMeta("float32", (3, 5), runs, flat=True)
    assert whole(tmp_path, tensor) == numbers.tobytes()


BOX = Chunk((0,), (4,), "f", 0, 16)


@pytest.mark.parametrize(
    ("shape", "chunks", "why"),
    [
        ((5,), (BOX,), "4 of 5 elements"),
        ((1 << 61,), (BOX,), "elements"),
        ((4,), (), "strided view"),
        ((2, 2), (BOX,), "outside its tensor"),
        ((3,), (BOX,), "outside its tensor"),
        ((4,), (Chunk((0,), (4,), "f", 8, 16),), "ends in the middle"),
        ((4,), (Chunk((0,), (4,), "f", 0, 8),), "ends in the middle"),
        ((4,), (Chunk((0,), (4,), "../f", 0, 16),), "outside its folder"),
        ((6,), (BOX, Chunk((2,), (2,), "f", 0, 8)), "no file holds"),
    ],
)
def test_what_the_files_do_not_hold_is_refused(
    tmp_path: Path, shape: tuple[int, ...], chunks: Any, why: str
) -> None:
    (tmp_path / "f").write_bytes(bytes(16))
    with pytest.raises(UserError, match=why):
        whole(tmp_path, TensorMeta("float32", shape, chunks))


def test_a_shard_of_another_save_is_seen(tmp_path: Path) -> None:
    samples.dcp_sharded(tmp_path / "a", {"w": torch.ones(4, 4)}, 1, 0)
    samples.dcp_sharded(tmp_path / "b", {"w": torch.ones(4, 4).double()}, 1, 0)
    (tmp_path / "a/.metadata").write_bytes((tmp_path / "b/.metadata").read_bytes())
    with pytest.raises(UserError):
        whole(tmp_path / "a", dcp.read(tmp_path / "a").tensors["w"])


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"")
    with (tmp_path / "big").open("r+b") as stream:
        stream.truncate(1 << 28)
    chunk = Chunk((0, 0), (1 << 13, 1 << 13), "big", 0, 1 << 28)
    tensor = TensorMeta("float32", (1 << 13, 1 << 13), (chunk,))
    largest = max(block.elements for block in elements.blocks(tensor.shape))
    assert largest <= elements.BLOCK_ELEMENTS
    block = next(elements.blocks(tensor.shape))
    assert elements.Elements(tmp_path, tensor).block(block).nbytes <= 4 * elements.BLOCK_ELEMENTS
