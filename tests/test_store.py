"""What is on disk is whole or recognisably torn, never outside the run, and can be verified."""

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptdrill import fact_files, store
from ckptdrill.errors import UserError
from ckptdrill.store import RunFolder


def values(path: Path) -> list[Any]:
    return [value for _, value in store.read_lines(path)]


# ---------------------------------------------------------------- lines


def test_lines_come_back_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    for number in (1, 2):
        store.append_line(path, {"n": number, "text": "ä\n"})
    assert list(store.read_lines(path)) == [
        (1, {"n": 1, "text": "ä\n"}),
        (2, {"n": 2, "text": "ä\n"}),
    ]


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert values(tmp_path / "missing.jsonl") == []


@pytest.mark.parametrize("torn", [b'{"n": 2, "te', b'{"n": 2}x', b"\xff\xfe", b"\x00" * 40])
def test_a_torn_last_line_is_skipped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"n": 1}\n' + torn)
    assert values(path) == [{"n": 1}]


@pytest.mark.parametrize("torn", [b'{"n": 2, "te', b"\xff", b'{"n": 2}'])
def test_a_line_after_a_torn_one_is_not_swallowed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"n": 1}\n' + torn)
    store.append_line(path, {"n": 3})
    assert values(path)[-1] == {"n": 3}
    assert values(path)[0] == {"n": 1}
    assert path.read_bytes().endswith(b'\n{"n": 3}\n')


@settings(max_examples=40)
@given(cut=st.integers(0, 60))
def test_a_kill_at_any_byte_costs_at_most_one_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal.jsonl"
    lines = b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(6))
    path.write_bytes(lines[: min(cut, len(lines))])
    whole = lines[:cut].count(b"\n")
    store.append_line(path, {"n": "last"})
    found = values(path)
    assert found[:whole] == [{"n": n} for n in range(whole)]
    assert found[-1] == {"n": "last"}
    assert len(found) <= whole + 2  # a line cut just before its newline is whole


# ---------------------------------------------------------------- whole files


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "verdict.json"
    store.write_json(path, {"n": 1})

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        store.write_json(path, {"n": 2})
    assert store.read_json(path) == {"n": 1}


def test_nothing_is_left_beside_a_written_file(tmp_path: Path) -> None:
    store.write_atomic(tmp_path / "a" / "b.txt", "text")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.txt"]


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: store.write_atomic(path, "text"),
        lambda path: store.write_json(path, {}),
        lambda path: store.append_line(path, {}),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_full_disk_is_told_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], call: str
) -> None:
    monkeypatch.setattr(os, call, full)
    with pytest.raises(UserError, match=r"cannot write x\.json: No space left") as error:
        write(tmp_path / "x.json")
    assert error.value.where == str(tmp_path)
    assert "--resume" in str(error.value)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    store.write_json(path, {"n": 1})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError):
        store.write_json(path, {"n": 2})
    monkeypatch.undo()
    assert store.read_json(path) == {"n": 1}


def test_a_missing_or_broken_file_is_the_users_to_see(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        store.read_json(tmp_path / "run.json")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        store.read_json(tmp_path / "run.json")


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name", ["a", "restore.two_to_four.dp-grow", "fsdp2+tp2=x", "9", "a" * 121]
)
def test_names_of_cells_and_launches_are_folder_names(name: str) -> None:
    assert store.safe_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".hidden", "-rf", "a/b", "/etc", "a..b", "a b", "a\nb", "a\n", "ä"),
        *("$(id)", "a;b", "a\x00", "a" * 122, "~", "*"),
    ],
)
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    run = RunFolder(tmp_path)
    for place in (run.launch, run.cell, run.work, run.damage):
        with pytest.raises(UserError, match="cannot be a folder name"):
            place(name)


@settings(max_examples=50)
@given(st.text(max_size=20))
def test_no_name_leaves_the_run(name: str) -> None:
    root = Path("/runs/x")
    try:
        path = RunFolder(root).launch(name)
    except UserError:
        return
    assert Path(os.path.normpath(path)).parent == root / "launches"


# ---------------------------------------------------------------- launches


def test_a_launch_is_read_rank_by_rank_with_addressable_facts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    folder = run.launch("source.two")
    for rank in (1, 0):
        store.append_line(folder / f"rank{rank}.jsonl", {"fact": "started", "rank": rank, "t": 1})
        store.append_line(folder / f"rank{rank}.jsonl", {"fact": "batch", "rank": rank, "step": 2})
    (folder / "rank1.jsonl").write_bytes((folder / "rank1.jsonl").read_bytes() + b'{"fact": "st')
    store.append_line(folder / "rank1.jsonl", {"note": "no fact"})
    store.append_line(folder / "rank1.jsonl", ["no", "object"])
    record = fact_files.read_launch(run, "source.two", 2)
    assert [(f.rank, f.kind, f.step) for f in record.facts] == [
        (0, "started", 0),
        (0, "batch", 2),
        (1, "started", 0),
        (1, "batch", 2),
    ]
    assert record.ref(record.facts[3]) == "launches/source.two/rank1.jsonl:2"
    assert record.facts[0].data == {}
    assert record.ended is None
    store.write_json(folder / "exit.json", {"returncode": 0})
    assert fact_files.read_launch(run, "source.two", 2).ended == {"returncode": 0}


# ---------------------------------------------------------------- evidence


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """A run with evidence, scratch, links, and names that a shell would trip over."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    root = tmp_path / "run"
    for name in ("run.json", "cells/a b/verdict.json", "launches/x/rank0.jsonl", "work/x/big"):
        store.write_atomic(root / name, name)
    (root / ".lock").touch()
    (root / "link.txt").symlink_to(outside / "secret.txt")
    (root / "cells" / "linked").symlink_to(outside, target_is_directory=True)
    store.write_atomic(root / "cells" / "work" / "kept.txt", "a cell may be called work")
    return root


LISTED = [
    "cells/a b/verdict.json",
    "cells/work/kept.txt",
    "launches/x/rank0.jsonl",
    "run.json",
]


def test_evidence_is_everything_but_scratch_links_and_bookkeeping(evidence: Path) -> None:
    store.write_manifest(evidence)
    found = sorted(str(p.relative_to(evidence)) for p in store.evidence_files(evidence))
    assert found == LISTED


def sha256sum(root: Path) -> int:
    command = ["sha256sum", "--check", "--strict", "--quiet", store.MANIFEST_NAME]
    return subprocess.run(command, cwd=root, capture_output=True, check=False).returncode


def test_the_list_is_verified_by_sha256sum_alone(evidence: Path) -> None:
    path = store.write_manifest(evidence)
    assert [line[66:] for line in path.read_text().splitlines()] == LISTED
    assert sha256sum(evidence) == 0
    first = path.read_bytes()
    assert store.write_manifest(evidence).read_bytes() == first
    (evidence / "run.json").write_text("changed")
    assert sha256sum(evidence) == 1


def test_trees_are_read_without_following_links(evidence: Path) -> None:
    names = {p.name for p in store.tree_files(evidence)}
    assert "secret.txt" not in names
    assert "link.txt" not in names
    assert "big" in names
    assert list(store.tree_files(evidence / "run.json")) == [evidence / "run.json"]


def test_the_file_system_is_that_of_the_mount_which_holds_the_path(tmp_path: Path) -> None:
    done = subprocess.run(
        ["stat", "--file-system", "--format=%T", "/proc"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert store.file_system(Path("/proc/self")) == done.stdout.strip()
    assert store.file_system(tmp_path / "not" / "there") == store.file_system(tmp_path)
    assert store.file_system(tmp_path) not in {"", "unknown"}
