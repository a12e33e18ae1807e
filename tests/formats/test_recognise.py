"""Recognition by content, and the parts of a folder side by side."""

import shutil
from pathlib import Path

import pytest

from ckptdrill import formats
from ckptdrill.errors import UserError


def test_formats_are_told_by_content_not_by_name(
    dcp_source: Path, torch_save_source: Path, tmp_path: Path
) -> None:
    renamed = Path(shutil.copy(torch_save_source, tmp_path / "weights.bin"))
    other = tmp_path / "model.pt"
    other.write_text("text")
    assert formats.recognise(dcp_source) == "dcp"
    assert formats.recognise(renamed) == "torch.save"
    assert formats.recognise(other) is None
    assert formats.recognise(tmp_path / "missing") is None
    with pytest.raises(UserError, match="not a checkpoint"):
        formats.tensors(other)


def test_parts_are_listed_together_with_files_relative_to_the_checkpoint(
    dcp_source: Path, torch_save_source: Path, tmp_path: Path
) -> None:
    shutil.copytree(dcp_source, tmp_path / "dcp")
    shutil.copy(torch_save_source, tmp_path / "rank0.pt")
    (tmp_path / "broken.pt").write_bytes(torch_save_source.read_bytes()[:300])
    listed = formats.tensors(tmp_path)
    assert listed["model.0.weight"].chunks[0].file == "rank0.pt"
    assert listed["dcp:model.0.weight"].chunks[0].file == "dcp/__0_0.distcp"
    ranges = [formats.payload(tmp_path, t.chunks[0]) for k, t in listed.items() if "0.weight" in k]
    assert len({path.read_bytes()[start : start + size] for path, start, size in ranges}) == 1


def test_a_folder_of_which_nothing_can_be_read_is_refused(
    torch_save_source: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.pt").write_bytes(torch_save_source.read_bytes()[:300])
    with pytest.raises(UserError, match="not a whole zip"):
        formats.tensors(tmp_path)


def test_a_shard_without_metadata_is_no_torch_save_file(dcp_source: Path, tmp_path: Path) -> None:
    shutil.copy(dcp_source / "__0_0.distcp", tmp_path)
    assert formats.recognise(tmp_path) is None
