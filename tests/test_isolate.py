"""Private copies that share nothing with their source, and snapshots that miss no change."""

import errno
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import isolate
from ckptdrill.errors import UserError
from ckptdrill.isolate import GuardLevel, changes, examine, glance, private_copy, snapshot


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source" / "step-4"
    (root / "deep").mkdir(parents=True)
    (root / "a.distcp").write_bytes(os.urandom(100_000))
    (root / "deep" / "b").write_bytes(b"b")
    (root / "empty").touch()
    (root / "latest").symlink_to("deep/b")
    os.utime(root / "a.distcp", ns=(1_000_000_007, 2_000_000_011))
    (root / "a.distcp").chmod(0o444)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_copy_is_equal_and_shares_nothing(source: Path, tmp_path: Path) -> None:
    before = snapshot(source)
    level = private_copy(source, tmp_path / "runs" / "copy")
    copy = tmp_path / "runs" / "copy"
    assert level in (GuardLevel.REFLINK, GuardLevel.COPY)
    assert contents(copy) == contents(source)
    assert (copy / "latest").readlink() == Path("deep/b")
    assert (copy / "a.distcp").stat().st_mtime_ns == 2_000_000_011
    for path in copy.rglob("*"):
        if path.is_file():
            path.resolve().write_bytes(b"overwritten")
    assert changes(before, snapshot(source)) == {}


def test_a_single_file_is_copied_and_the_owner_may_write_it(source: Path, tmp_path: Path) -> None:
    private_copy(source / "a.distcp", tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == (source / "a.distcp").read_bytes()
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o644


def test_hard_links_in_the_source_become_files_of_their_own(source: Path, tmp_path: Path) -> None:
    os.link(source / "deep" / "b", source / "twin")
    private_copy(source, tmp_path / "copy")
    assert (tmp_path / "copy" / "twin").stat().st_nlink == 1


def test_a_source_named_by_a_link_is_followed(source: Path, tmp_path: Path) -> None:
    (source.parent / "latest").symlink_to("step-4")
    private_copy(source.parent / "latest", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(source)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "deep/../../step-4/a.distcp"])
def test_a_link_that_leaves_is_refused_and_nothing_stays(
    source: Path, tmp_path: Path, target: str
) -> None:
    (source / "link").symlink_to(target)
    if target.startswith("deep"):
        private_copy(source, tmp_path / "copy")  # it comes back: it does not leave
        return
    with pytest.raises(UserError, match="leaves the checkpoint"):
        private_copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_chain_of_links_that_leaves_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (source / "first").symlink_to("second/x")
    (source / "second").symlink_to("../../outside")
    with pytest.raises(UserError, match="leaves the checkpoint"):
        private_copy(source, tmp_path / "copy")


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes device nodes, and not everywhere")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # its whole path may be too long for an address
        server.bind(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, make_socket, make_device])
def test_special_files_are_refused_and_never_opened(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    examine(source)
    make(source / "special")
    for refuse in (lambda: private_copy(source, tmp_path / "copy"), lambda: examine(source)):
        with pytest.raises(UserError, match="neither"):
            refuse()
    assert not (tmp_path / "copy").exists()
    assert snapshot(source)["special"][-1] == "special"


def test_a_file_that_cannot_be_read_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_args: Any, **_keys: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(UserError, match="cannot read: Permission denied") as caught:
        snapshot(source / "deep")
    assert caught.value.where == str(source / "deep" / "b")
    with pytest.raises(UserError, match="Permission denied"):
        private_copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_loop_of_folders_is_copied_as_the_link_that_it_is(source: Path, tmp_path: Path) -> None:
    (source / "deep" / "up").symlink_to("..")
    (source / "itself").symlink_to("itself")
    private_copy(source, tmp_path / "copy")
    assert (tmp_path / "copy" / "deep" / "up").readlink() == Path("..")
    assert {"deep/up", "itself"} <= set(snapshot(source))


@pytest.mark.parametrize("name", [b"new\nline", b"<b>&", b"\xff\xfe", b"back\\slash"])
def test_any_name_is_copied(source: Path, tmp_path: Path, name: bytes) -> None:
    (source / os.fsdecode(name)).write_bytes(name)
    private_copy(source, tmp_path / "copy")
    assert (tmp_path / "copy" / os.fsdecode(name)).read_bytes() == name
    json.dumps(snapshot(source), ensure_ascii=False).encode()


def test_a_sparse_file_takes_no_more_room_than_it_had(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger than any disk, and next to nothing on it."""
    monkeypatch.setattr(isolate, "_clone", refuse_to_clone)
    size_bytes = 1 << 42
    with (source / "sparse").open("wb") as stream:
        stream.write(b"begin")
        stream.seek(size_bytes // 2)
        stream.write(b"middle")
        stream.truncate(size_bytes)
    private_copy(source, tmp_path / "copy")
    copy = tmp_path / "copy" / "sparse"
    assert copy.stat().st_size == size_bytes
    assert copy.stat().st_blocks * 512 < 1 << 20
    with copy.open("rb") as stream:
        assert stream.read(5) == b"begin"
        stream.seek(size_bytes // 2)
        assert stream.read(8) == b"middle\0\0"


def test_places_that_cannot_be_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="taken"):
        private_copy(source, source.parent)
    with pytest.raises(UserError, match="inside its source"):
        private_copy(source, source / "copy")
    with pytest.raises(UserError, match="no checkpoint"):
        private_copy(source / "missing", tmp_path / "copy")


def refuse_to_clone(source: Path, target: Path) -> bool:
    target.touch()
    return False


def test_too_little_space_is_said_before_copying(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolate, "_clone", refuse_to_clone)
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(UserError, match="are free"):
        private_copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=100_001))
    assert private_copy(source, tmp_path / "copy") is GuardLevel.COPY


def test_where_files_can_be_cloned_the_level_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolate, "_clone", lambda a, b: bool(shutil.copyfile(a, b)))
    assert private_copy(source, tmp_path / "copy") is GuardLevel.REFLINK


def test_a_disk_that_fills_up_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(isolate, "_clone", refuse_to_clone)
    monkeypatch.setattr(isolate, "_move_block", full)
    with pytest.raises(UserError, match="No space left"):
        private_copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_the_copy_without_kernel_help_is_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_args: Any) -> int:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(isolate, "_clone", refuse_to_clone)
    monkeypatch.setattr(os, "copy_file_range", unsupported)
    private_copy(source, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(source)


def test_nothing_changed_is_said_as_nothing(source: Path) -> None:
    before = snapshot(source)
    assert set(before) == {"a.distcp", "deep/b", "empty", "latest"}
    contents(source)  # reading is no change
    assert changes(before, snapshot(source)) == {}


def test_every_kind_of_change_is_named(source: Path) -> None:
    before = snapshot(source)
    status = (source / "deep" / "b").stat()
    (source / "deep" / "b").write_bytes(b"c")  # same size, and the time is put back
    os.utime(source / "deep" / "b", ns=(status.st_atime_ns, status.st_mtime_ns))
    (source / "new").touch()
    os.utime(source / "a.distcp")
    (source / "latest").unlink()
    (source / "swap").write_bytes(b"")
    (source / "swap").replace(source / "empty")
    assert changes(before, snapshot(source)) == {
        "a.distcp": "touched (mtime)",
        "deep/b": "content changed",
        "empty": "replaced by a file of the same content",
        "latest": "removed",
        "new": "added",
    }


def test_a_glance_sees_all_but_content(source: Path) -> None:
    before = snapshot(source)
    assert changes(before, glance(source)) == {}
    status = (source / "deep" / "b").stat()
    (source / "deep" / "b").write_bytes(b"c")
    os.utime(source / "deep" / "b", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert changes(before, glance(source)) == {}
    os.utime(source / "a.distcp")
    (source / "empty").unlink()
    (source / "deep" / "b").write_bytes(b"longer")
    assert changes(before, glance(source)) == {
        "a.distcp": "touched (mtime)",
        "deep/b": "content changed",
        "empty": "removed",
    }


def test_a_link_that_points_elsewhere_is_a_change(source: Path) -> None:
    before = snapshot(source)
    (source / "latest").unlink()
    (source / "latest").symlink_to("deep/x")
    assert changes(before, snapshot(source)) == {"latest": "content changed"}


def test_a_single_file_is_recorded_by_its_name(source: Path) -> None:
    assert set(snapshot(source / "a.distcp")) == {"a.distcp"}
