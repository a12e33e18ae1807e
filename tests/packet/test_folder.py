"""The packet as files: derived from what is stored, again and again the same, listed last."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptdrill.errors import UserError
from ckptdrill.model import Reason, VerdictWord
from ckptdrill.packet import StoredCell, read, verify, write
from ckptdrill.store import MANIFEST_NAME, RunFolder, write_json

StoreRun = Callable[..., RunFolder]
DERIVED = ("index.html", "packet.json", "packet.md", MANIFEST_NAME)


def test_deleted_derived_files_come_back_byte_for_byte(
    store_run: StoreRun, all_three: list[StoredCell]
) -> None:
    run = store_run(all_three)
    write(run)
    before = {name: (run.root / name).read_bytes() for name in DERIVED}
    for name in DERIVED:
        (run.root / name).unlink()
    write(run)
    assert {name: (run.root / name).read_bytes() for name in DERIVED} == before


def test_writing_again_over_a_packet_changes_nothing(
    store_run: StoreRun, all_three: list[StoredCell]
) -> None:
    run = store_run(all_three)
    write(run)
    before = (run.root / MANIFEST_NAME).read_bytes()
    write(run)
    assert (run.root / MANIFEST_NAME).read_bytes() == before


def test_sha256sum_alone_verifies_the_folder(
    store_run: StoreRun, all_three: list[StoredCell]
) -> None:
    run = store_run(all_three)
    write(run)
    command = ["sha256sum", "--check", "--strict", "--quiet", MANIFEST_NAME]
    subprocess.run(command, cwd=run.root, check=True)
    listed = (run.root / MANIFEST_NAME).read_text()
    assert all(f"  {name}\n" in listed for name in DERIVED[:3])
    assert verify(run.root) == []
    (run.root / "run.json").write_text("{}")
    assert subprocess.run(command, cwd=run.root, check=False, capture_output=True).returncode == 1


def test_an_empty_run_has_a_packet(store_run: StoreRun) -> None:
    run = store_run([])
    write(run)
    summary = json.loads((run.root / "packet.json").read_text())["summary"]
    assert (summary["cells"], summary["pass"]) == (0, 0)
    assert verify(run.root) == []


def test_a_cell_without_files_is_shown_as_not_run(
    store_run: StoreRun, all_three: list[StoredCell]
) -> None:
    run = store_run(all_three)
    (run.cell("a-pass") / "verdict.json").unlink()
    (run.root / "cells" / "z-empty").mkdir()
    found = {cell.id: (cell.word, cell.reason) for cell in read(run).cells}
    assert found["a-pass"] == found["z-empty"] == (VerdictWord.UNPROVEN, Reason.NOT_RUN)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_torn_verdict_never_becomes_a_pass(
    store_run: StoreRun, all_three: list[StoredCell], content: bytes
) -> None:
    run = store_run(all_three)
    (run.cell("a-pass") / "verdict.json").write_bytes(content)
    write(run)
    found = {cell.id: cell for cell in read(run).cells}
    assert found["a-pass"].word is VerdictWord.UNPROVEN


def test_how_each_launch_was_started_is_read_from_its_folder(
    store_run: StoreRun, all_three: list[StoredCell]
) -> None:
    run = store_run(all_three)
    write_json(run.launch("restore-a-pass") / "launch.json", {"launcher": "warm", "guard": "copy"})
    (run.root / "launches" / "source-fsdp4").mkdir()
    (run.root / "launches" / "source-fsdp4" / "launch.json").write_text("{")
    found = {cell.id: cell.launches for cell in read(run).cells}
    restores = [each for each in found["a-pass"] if each.part == "restore"]
    assert [(each.launcher, each.guard) for each in restores] == [("warm", "copy")]


def test_a_missing_replay_script_is_not_linked(
    store_run: StoreRun, all_three: list[StoredCell]
) -> None:
    run = store_run(all_three)
    (run.cell("a-pass") / "repro.sh").unlink()
    found = {cell.id: cell.replay for cell in read(run).cells}
    assert found["a-pass"] is None
    assert found["c-refused"] == "cells/c-refused/repro.sh"


def test_a_program_that_shows_a_cell_alone_is_linked_and_told(
    store_run: StoreRun, all_three: list[StoredCell]
) -> None:
    run = store_run(all_three)
    (run.cell("d-diverged") / "repro.py").write_text("print('see')\n")
    write(run)
    packet = json.loads((run.root / "packet.json").read_bytes())
    told = {cell["id"]: cell["repro"] for cell in packet["cells"]}
    assert told.pop("d-diverged") == "cells/d-diverged/repro.py"
    assert set(told.values()) == {None}
    page = (run.root / "index.html").read_text()
    assert page.count('<a href="cells/d-diverged/repro.py">') == 1
    assert page.count("--alone") == 1
    assert "cells/d-diverged/repro.py" in (run.root / "manifest-sha256.txt").read_text()


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_a_folder_that_is_no_run_is_a_user_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError):
        write(RunFolder(tmp_path))
