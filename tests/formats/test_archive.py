"""Zip members as byte ranges, against archives of Python's own zipfile."""

import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptdrill.errors import UserError
from ckptdrill.formats import archive


def write(path: Path, compression: int = zipfile.ZIP_STORED) -> bytes:
    with zipfile.ZipFile(path, "w", compression) as target:
        target.writestr("a/data.pkl", b"first" * 20)
        target.writestr("a/data/0", b"second")
    return path.read_bytes()


def test_members_are_found_at_an_offset_too(tmp_path: Path) -> None:
    content = write(tmp_path / "a.zip")
    path = tmp_path / "joined"
    path.write_bytes(b"before" + content + b"after")
    _, second = archive.members(path, 6, len(content))
    assert archive.read_member(path, second, 6) == b"second"
    with pytest.raises(UserError, match="over the limit"):
        archive.read_member(path, second, 5)
    with pytest.raises(UserError, match="does not begin"):
        archive.members(path, 0, len(content) + 6)


def test_a_compressed_member_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.zip", zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="compressed"):
        archive.members(tmp_path / "a.zip")


def test_members_that_share_bytes_are_refused(tmp_path: Path) -> None:
    content = bytearray(write(tmp_path / "a.zip"))
    second = content.rindex(b"PK\x01\x02")
    content[second + 42 : second + 46] = bytes(4)  # its local header is now that of the first
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UserError, match="overlaps"):
        archive.members(tmp_path / "a.zip")


@given(st.integers(0, 1 << 12), st.integers(0, 255), st.none() | st.integers(0, 1 << 12))
def test_a_mutated_archive_stays_inside_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int | None
) -> None:
    path = tmp_path_factory.mktemp("zip") / "a.zip"
    content = bytearray(write(path))
    content[position % len(content)] = value
    path.write_bytes(content[: cut if cut is None else cut % len(content)])
    try:
        found = archive.members(path)
    except UserError:
        return
    assert all(member.start_byte + member.size_bytes <= len(content) for member in found)
