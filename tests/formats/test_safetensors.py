"""The safetensors reader: what it lists, and every way in which a header can lie."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptdrill.errors import UserError
from ckptdrill.formats import safetensors


def packed(header: Any, payload: bytes = b"", length: int | None = None) -> bytes:
    """A file of this header, as the library writes it, or with another length in front."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


def entry(first: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


GOOD = {
    "__metadata__": {"format": "pt"},
    "a": entry(0, 24, [2, 3]),
    "b": entry(24, 26, [], "BF16"),
}


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def test_tensors_are_listed_with_the_range_of_their_bytes(tmp_path: Path) -> None:
    payload = bytes(range(26))
    path = write(tmp_path, packed(GOOD, payload))
    assert safetensors.is_safetensors(path.read_bytes()[:10])
    found = safetensors.read(path)
    assert found.notes == {"format": "pt"}
    assert (found.tensors["a"].dtype, found.tensors["a"].shape) == ("float32", (2, 3))
    (chunk,) = found.tensors["b"].chunks
    raw = path.read_bytes()[chunk.offset_bytes : chunk.offset_bytes + chunk.length_bytes]
    assert raw == payload[24:]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02",
        packed(GOOD, bytes(25)),
        packed(GOOD, bytes(27)),
        packed(GOOD, bytes(26), length=1 << 40),
        packed(GOOD, bytes(26), length=10),
        packed(b"[]"),
        packed(b"{"),
        packed(b"[" * 100_000),
        packed(b'{"a": 1}'),
        packed(b'{"a": {}, "a": {}}'),
        packed({"a": entry(0, 4, [1], "F31")}, bytes(4)),
        packed({"a": entry(0, 4, [2])}, bytes(4)),
        packed({"a": entry(0, 4, [-1])}, bytes(4)),
        packed({"a": entry(0, 4, [1 << 61, 8])}, bytes(4)),
        packed({"a": entry(0, 4, [1] * 17)}, bytes(4)),
        packed({"a": entry(0, 4, [True])}, bytes(4)),
        packed({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)),
        packed({"a": entry(4, 8, [1])}, bytes(8)),
        packed({"a" * 600: entry(0, 4, [1])}, bytes(4)),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match="not a whole safetensors file"):
        safetensors.read(write(tmp_path, content))


@given(st.integers(0, 400), st.integers(0, 255), st.none() | st.integers(0, 400))
def test_a_mutated_file_stays_inside_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int | None
) -> None:
    content = bytearray(packed(GOOD, bytes(26)))
    content[position % len(content)] = value
    kept = bytes(content[: cut if cut is None else cut % len(content)])
    try:
        found = safetensors.read(write(tmp_path_factory.mktemp("mutated"), kept))
    except UserError:
        return
    for tensor in found.tensors.values():
        assert all(c.offset_bytes + c.length_bytes <= len(kept) for c in tensor.chunks)
