"""Pointers are copied as they were at another step, and each lie is what a job then reads."""

from pathlib import Path

import pytest

from ckptdrill import pointers
from ckptdrill.errors import UserError
from ckptdrill.model import PointerLie

STEPS = {"step-8": "step-12", "8": "12"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A file, a link and a number that name step 8, and what only looks like a pointer."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "latest").write_text("step-8\n")
    (folder / "latest_checkpointed_iteration.txt").write_text("8")
    (folder / "last.ckpt").symlink_to("step-8")
    (folder / "latest.bin").write_bytes(b"x" * 5000)
    (folder / "step-8").mkdir()
    return folder


def said(folder: Path) -> dict[str, str]:
    return {path.name: pointers.text_of(path) for path in pointers.found(folder)}


def test_small_files_and_links_are_pointers(out: Path) -> None:
    assert said(out) == {
        "last.ckpt": "step-8",
        "latest": "step-8",
        "latest_checkpointed_iteration.txt": "8",
    }


def test_a_copy_names_another_step(out: Path, tmp_path: Path) -> None:
    pointers.copy(out, tmp_path / "kept", ["."], STEPS, (out, tmp_path))
    assert set(said(tmp_path / "kept").values()) == {"step-12", "12"}
    assert (tmp_path / "kept/latest").read_text() == "step-12\n"
    assert set(said(out).values()) == {"step-8", "8"}


def test_a_path_into_the_source_is_moved(out: Path, tmp_path: Path) -> None:
    (out / "latest").write_text(f"{out}/step-8\n")
    pointers.copy(out, tmp_path / "kept", ["."], {}, (out, tmp_path / "new"))
    assert said(tmp_path / "kept")["latest"] == f"{tmp_path}/new/step-8"


def test_a_pointer_may_lie_beside_the_checkpoint(out: Path, tmp_path: Path) -> None:
    (out / "run").mkdir()
    (out / "run" / "latest").write_text("step-8")
    pointers.copy(out, tmp_path / "kept", [".", "run"], STEPS, (out, tmp_path))
    assert said(tmp_path / "kept" / "run") == {"latest": "step-12"}


@pytest.mark.parametrize("kind", PointerLie)
def test_every_lie_changes_every_pointer(out: Path, kind: PointerLie) -> None:
    record = pointers.lie(out, kind, STEPS)
    assert record["fired"]
    assert [pointer["path"] for pointer in record["pointers"]] == [
        "last.ckpt",
        "latest",
        "latest_checkpointed_iteration.txt",
    ]
    assert all(pointer["before"] != pointer["after"] for pointer in record["pointers"])
    assert all(file["sha256_before"] != file["sha256_after"] for file in record["files"])
    assert (out / "latest.bin").stat().st_size == 5000


def test_what_the_lies_leave(out: Path) -> None:
    pointers.lie(out, PointerLie.MISSING, STEPS)
    assert said(out)["last.ckpt"] == "step-12"
    assert (out / "latest").read_text() == "step-12\n"
    pointers.lie(out, PointerLie.GARBAGE, {})
    with pytest.raises(UnicodeDecodeError):
        (out / "latest").read_text(encoding="utf-8")
    pointers.lie(out, PointerLie.EMPTY, {})
    assert (out / "latest").read_bytes() == b""
    assert (out / "last.ckpt").resolve() == out
    pointers.lie(out, PointerLie.REMOVED, {})
    assert pointers.found(out) == ()


def test_a_lie_that_the_pointers_do_not_understand_has_not_fired(out: Path) -> None:
    record = pointers.lie(out, PointerLie.STALE, {"global_step8": "global_step4"})
    assert record["fired"] is False


def test_no_pointer_no_lie(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keeps no pointer"):
        pointers.lie(tmp_path, PointerLie.REMOVED, {})
