"""The DCP reader against checkpoints that torch itself wrote, and against hostile metadata."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptdrill.errors import UserError
from ckptdrill.formats import dcp, pickles


@pytest.fixture
def checkpoint(dcp_source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(dcp_source, tmp_path / "step-1")


def rewrite(checkpoint: Path, old: bytes, new: bytes) -> None:
    """Replace a text in the metadata by another of the same length."""
    path = checkpoint / ".metadata"
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))


def test_every_tensor_is_listed_with_its_type_and_shape(
    dcp_source: Path, state: dict[str, Any]
) -> None:
    found = dcp.read(dcp_source)
    weight = found.tensors["model.0.weight"]
    assert (weight.dtype, weight.shape, weight.size_bytes) == ("float32", (16, 8), 512)
    assert {f"model.{key}" for key in state["model"]} <= set(found.tensors)
    assert "optimizer.state.0.exp_avg" in found.tensors
    assert "step" in found.blobs
    assert found.files == ("__0_0.distcp",)


def test_the_payload_is_the_raw_bytes_of_each_tensor(
    dcp_source: Path, state: dict[str, Any]
) -> None:
    found = dcp.read(dcp_source)
    for key, value in state["model"].items():
        (chunk,) = found.tensors[f"model.{key}"].chunks
        path, start, size = dcp.payload(dcp_source, chunk)
        assert path.read_bytes()[start : start + size] == value.numpy().tobytes()


def test_the_metadata_of_a_deleted_shard_is_still_read(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    (chunk,) = dcp.read(checkpoint).tensors["model.0.weight"].chunks
    with pytest.raises(UserError, match=r"no file __0_0\.distcp"):
        dcp.payload(checkpoint, chunk)


def test_a_truncated_shard_has_no_payload(checkpoint: Path) -> None:
    with (checkpoint / "__0_0.distcp").open("r+b") as shard:
        shard.truncate(17_000)
    (chunk,) = dcp.read(checkpoint).tensors["model.0.weight"].chunks
    with pytest.raises(UserError, match="not a whole zip"):
        dcp.payload(checkpoint, chunk)


@pytest.mark.parametrize("name", [b"../secret.12", b"/etc/passwd1", b"a/../../b.cc"])
def test_a_path_out_of_the_folder_is_refused(checkpoint: Path, name: bytes) -> None:
    dcp.read(checkpoint)
    rewrite(checkpoint, b"__0_0.distcp", name)
    with pytest.raises(UserError, match="outside its folder"):
        dcp.read(checkpoint)


def test_a_path_that_is_none_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, b"__0_0.distcp", b"__0_0\0distcp")
    with pytest.raises(UserError, match="not a path"):
        dcp.read(checkpoint)


def test_a_link_is_followed_within_the_folder_only(checkpoint: Path, tmp_path: Path) -> None:
    shard = checkpoint / "__0_0.distcp"
    moved = shard.rename(checkpoint / "elsewhere")
    shard.symlink_to("elsewhere")
    assert dcp.read(checkpoint).files
    moved.rename(tmp_path / "outside")
    shard.unlink()
    shard.symlink_to("../outside")
    with pytest.raises(UserError, match="outside its folder"):
        dcp.read(checkpoint)


def test_metadata_that_is_a_link_out_of_the_folder_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / ".metadata").rename(tmp_path / "outside")
    (checkpoint / ".metadata").symlink_to("../outside")
    with pytest.raises(UserError, match="outside its folder"):
        dcp.read(checkpoint)


class _Creates:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def test_hostile_metadata_is_refused_and_leaves_no_file(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Creates(tmp_path / "proof")))
    with pytest.raises(pickles.Refused, match=r"io\.open"):
        dcp.read(checkpoint)
    assert not (tmp_path / "proof").exists()


def test_missing_metadata_is_an_uncommitted_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        dcp.read(tmp_path)
    assert "never committed" in str(caught.value)


@given(
    edits=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.none() | st.integers(0, 1 << 16),
)
def test_mutated_metadata_gives_an_inventory_or_a_user_error(
    dcp_source: Path, tmp_path_factory: pytest.TempPathFactory, edits: Any, cut: int | None
) -> None:
    content = bytearray((dcp_source / ".metadata").read_bytes())
    for position, value in edits:
        content[position % len(content)] = value
    folder = tmp_path_factory.mktemp("mutated")
    (folder / ".metadata").write_bytes(content[: cut if cut is None else cut % len(content)])
    try:
        found = dcp.read(folder)
    except UserError:
        return
    for tensor in found.tensors.values():
        assert all(chunk.file in found.files for chunk in tensor.chunks)


def shared(target: bytes, times: int) -> bytes:
    """A dictionary that refers many times to one key and one value of the memo, by 0 and 1."""
    return target + b"(" + b"h\0h\1" * times + b"u"


def test_metadata_that_repeats_itself_is_refused(tmp_path: Path) -> None:
    module = b"ctorch.distributed.checkpoint.metadata\n"
    entries = module + b"MetadataIndex\n)\x81}bq\0Nq\x01" + shared(b"}", 300_000)
    metadata = module + b"Metadata\n)\x81}(X\x0c\0\0\0storage_data" + entries + b"ub."
    (tmp_path / ".metadata").write_bytes(metadata)
    with pytest.raises(pickles.Refused, match="at most 50000"):
        dcp.read(tmp_path)
