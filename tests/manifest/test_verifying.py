"""Every way in which a checkpoint can differ from its manifest has its own name, and nothing else.

Each damage has its twin in `test_an_untouched_checkpoint`: the same folder without it has no
finding.
"""

import os
import random
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptdrill import manifest
from ckptdrill.errors import UserError
from ckptdrill.manifest import (
    Manifest,
    Problem,
    ProblemKind,
    Sample,
    Status,
    files,
    hashing,
    helpers,
)
from ckptdrill.manifest.record import MEANING, LinkRecord, printable
from tests.formats import samples
from tests.manifest.folders import FILES, make

K = ProblemKind
MARKER = "trainer_state.json"
MANY = 1 << 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "step-7")


@pytest.fixture
def record(folder: Path) -> Manifest:
    return manifest.commit(folder, manifest.describe(folder))


def found(problems: tuple[Problem, ...]) -> list[tuple[ProblemKind, str]]:
    return [(problem.kind, problem.path) for problem in problems]


def changed(record: Manifest, name: str, **fields: object) -> Manifest:
    """`record` with other fields for the file called `name`."""
    return record.model_copy(
        update={
            "files": tuple(
                file.model_copy(update=fields) if file.path == name else file
                for file in record.files
            )
        }
    )


def test_every_kind_is_explained() -> None:
    assert list(MEANING) == list(ProblemKind)


def test_an_untouched_checkpoint(folder: Path, record: Manifest) -> None:
    audit = manifest.check(folder)
    assert audit.ok
    assert manifest.verify(folder, record) == ()
    assert audit.hashed == {name: len(data) for name, data in FILES.items()}
    assert audit.unread == {}


def _flip(folder: Path) -> None:
    path = folder / "part-0.bin"
    data = bytearray(path.read_bytes())
    data[1234] ^= 4
    path.write_bytes(data)


def _truncate(folder: Path) -> None:
    os.truncate(folder / "part-0.bin", 10)


def _replace_by_link(folder: Path) -> None:
    (folder / "part-0.bin").rename(folder.parent / "elsewhere")
    (folder / "part-0.bin").symlink_to("../elsewhere")


def _replace_by_pipe(folder: Path) -> None:
    (folder / "part-0.bin").unlink()
    os.mkfifo(folder / "part-0.bin")


def _replace_by_folder(folder: Path) -> None:
    (folder / "part-0.bin").unlink()
    (folder / "part-0.bin").mkdir()


def _link_the_folder(folder: Path) -> None:
    (folder / "sub").rename(folder.parent / "elsewhere")
    (folder / "sub").symlink_to("../elsewhere")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_flip, [(K.CHECKSUM_DIFFERS, "part-0.bin")]),
        (_truncate, [(K.SIZE_DIFFERS, "part-0.bin")]),
        (lambda f: (f / "part-0.bin").unlink(), [(K.MISSING, "part-0.bin")]),
        (lambda f: (f / "new").write_bytes(b""), [(K.EXTRA, "new")]),
        (lambda f: (f / "new").symlink_to("part-0.bin"), [(K.NOT_A_FILE, "new")]),
        (lambda f: os.mkfifo(f / "new"), [(K.NOT_A_FILE, "new")]),
        (_replace_by_link, [(K.NOT_A_FILE, "part-0.bin")]),
        (_replace_by_pipe, [(K.NOT_A_FILE, "part-0.bin")]),
        (_replace_by_folder, [(K.NOT_A_FILE, "part-0.bin")]),
        (_link_the_folder, [(K.MISSING, "sub/part-1.bin"), (K.NOT_A_FILE, "sub")]),
    ],
)
def test_a_damage_and_its_name(
    folder: Path,
    record: Manifest,
    damage: Callable[[Path], None],
    expected: list[tuple[ProblemKind, str]],
) -> None:
    damage(folder)
    assert found(manifest.verify(folder, record)) == expected


def test_two_files_that_changed_places(folder: Path, record: Manifest) -> None:
    one, other = folder / "part-0.bin", folder / "sub/part-1.bin"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    assert found(manifest.verify(folder, record)) == [
        (K.SIZE_DIFFERS, "part-0.bin"),
        (K.SIZE_DIFFERS, "sub/part-1.bin"),
    ]


def test_without_a_checksum_nothing_is_verified(folder: Path, record: Manifest) -> None:
    without = changed(record, "part-0.bin", sha256=None)
    assert found(manifest.verify(folder, without)) == [(K.CHECKSUM_ABSENT, "part-0.bin")]


def test_not_committed(folder: Path, record: Manifest) -> None:
    staged = record.model_copy(update={"status": Status.IN_PROGRESS})
    assert found(manifest.verify(folder, staged)) == [(K.NOT_COMMITTED, "")]


def test_problems_come_in_the_order_of_the_list(folder: Path, record: Manifest) -> None:
    _flip(folder)
    (folder / "new").write_bytes(b"")
    (folder / "sub/part-1.bin").unlink()
    kinds = [problem.kind for problem in manifest.verify(folder, record)]
    assert kinds == [K.MISSING, K.EXTRA, K.CHECKSUM_DIFFERS]


# --------------------------------------------------------------------------------------------------
# The manifest itself


def test_no_manifest(folder: Path) -> None:
    assert found(manifest.check(folder).problems) == [
        (K.MANIFEST_MISSING, "checkpoint.manifest.json")
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"files": [{"path": 1, "bytes": 0}]}',
        b'{"files": [{"path": "a", "bytes": -1}]}',
        b'{"files": [{"path": "a", "bytes": 1, "sha256": "abc"}]}',
        b'{"files": [{"path": "a", "bytes": 1}, {"path": "a", "bytes": 1}]}',
        b'{"status": "done"}',
        b'{"verified": true}',
        b"[" * 100_000,
    ],
)
def test_a_manifest_that_is_none(folder: Path, record: Manifest, text: bytes) -> None:
    manifest.path_of(folder).write_bytes(text)
    assert [p.kind for p in manifest.check(folder).problems] == [K.MANIFEST_UNREADABLE]


@pytest.mark.parametrize("length", [1, 100, 1000])
def test_a_torn_manifest(folder: Path, record: Manifest, length: int) -> None:
    os.truncate(manifest.path_of(folder), length)
    assert [p.kind for p in manifest.check(folder).problems] == [K.MANIFEST_UNREADABLE]


def test_a_manifest_that_is_a_link_or_a_pipe(folder: Path, record: Manifest) -> None:
    path = manifest.path_of(folder)
    path.rename(folder.parent / "elsewhere")
    path.symlink_to("../elsewhere")
    assert [p.kind for p in manifest.check(folder).problems] == [K.MANIFEST_UNREADABLE]
    path.unlink()
    os.mkfifo(path)
    assert [p.kind for p in manifest.check(folder).problems] == [K.MANIFEST_UNREADABLE]


def test_a_huge_manifest_is_not_read(folder: Path, record: Manifest) -> None:
    os.truncate(manifest.path_of(folder), 1 << 40)
    assert [p.kind for p in manifest.check(folder).problems] == [K.MANIFEST_UNREADABLE]


@pytest.mark.parametrize("more", ["", ', "digest_of_ranges": []'])
def test_a_newer_manifest(folder: Path, record: Manifest, more: str) -> None:
    manifest.path_of(folder).write_text(f'{{"manifest_version": 2{more}}}')
    assert [p.kind for p in manifest.check(folder).problems] == [K.VERSION_UNKNOWN]


def test_a_record_survives_its_file(folder: Path, record: Manifest) -> None:
    assert manifest.read(manifest.path_of(folder)) == record


# --------------------------------------------------------------------------------------------------
# Paths out of a hostile manifest


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../secret", "sub/../../secret", "", ".", "sub//part-1.bin", "./part-0.bin"],
)
def test_a_path_that_leads_out_is_not_opened(
    folder: Path, record: Manifest, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "secret").write_bytes(FILES["part-0.bin"])
    opened: list[str] = []
    real = files.open_inside

    def spy(root: Path, relative: str) -> int:
        opened.append(relative)
        return real(root, relative)

    monkeypatch.setattr(files, "open_inside", spy)
    hostile = changed(record, "part-0.bin", path=path)
    problems = found(manifest.verify(folder, hostile))
    assert (K.PATH_ESCAPES, path) in problems
    assert path not in opened
    assert len(opened) == len(FILES) - 1


def test_a_path_with_a_null_byte_is_refused_by_the_opener(folder: Path) -> None:
    with pytest.raises(manifest.record.ProblemError) as raised:
        files.open_inside(folder, "a\0b")
    assert raised.value.problem.kind is K.PATH_ESCAPES


def test_the_opener_goes_through_no_link(folder: Path) -> None:
    (folder / "to-sub").symlink_to("sub")
    with pytest.raises(manifest.record.ProblemError) as raised:
        files.open_inside(folder, "to-sub/part-1.bin")
    assert raised.value.problem.kind is K.NOT_A_FILE


def test_a_link_as_recorded_and_another(folder: Path) -> None:
    (folder / "link").symlink_to("part-0.bin")
    record = manifest.describe(folder)
    assert manifest.verify(folder, record) == ()
    (folder / "link").unlink()
    (folder / "link").symlink_to("sub/part-1.bin")
    assert found(manifest.verify(folder, record)) == [(K.LINK_DIFFERS, "link")]


def test_a_recorded_link_that_leads_out(folder: Path, record: Manifest) -> None:
    (folder / "link").symlink_to("../x")
    hostile = record.model_copy(update={"links": (LinkRecord(path="link", target="../x"),)})
    assert found(manifest.verify(folder, hostile)) == [(K.PATH_ESCAPES, "link")]


def test_hard_links_are_read_like_any_file(folder: Path, record: Manifest) -> None:
    (folder.parent / "other-name").hardlink_to(folder / "part-0.bin")
    assert manifest.verify(folder, record) == ()


def test_a_problem_is_printed_without_control_characters() -> None:
    problem = Problem(K.EXTRA, "a\x1b[31m\udcff\n", "there")
    assert str(problem) == r"extra: a\x1b[31m\udcff\n: there"
    assert printable("ä b") == "ä b"


# --------------------------------------------------------------------------------------------------
# The commit marker and its time


def _rewrite(path: Path, data: bytes, moved_s: float) -> None:
    before = path.stat().st_mtime_ns
    path.write_bytes(data)
    at = before + int(moved_s * 1e9)
    os.utime(path, ns=(at, at))


def test_the_marker_is_gone(folder: Path, record: Manifest) -> None:
    (folder / MARKER).unlink()
    assert found(manifest.check(folder).problems) == [
        (K.MARKER_MISSING, MARKER),
        (K.MISSING, MARKER),
    ]


def test_the_marker_was_written_again_with_the_same_bytes(folder: Path, record: Manifest) -> None:
    _rewrite(folder / MARKER, FILES[MARKER], 60)
    assert found(manifest.check(folder).problems) == [(K.MARKER_NEWER_THAN_MANIFEST, MARKER)]


def test_the_marker_of_a_later_save(folder: Path, record: Manifest) -> None:
    _rewrite(folder / MARKER, b'{"global_step": 8}', 60)
    kinds = {kind for kind, _ in found(manifest.check(folder).problems)}
    assert kinds == {K.MARKER_DIFFERS, K.MARKER_NEWER_THAN_MANIFEST, K.CHECKSUM_DIFFERS}


def test_the_marker_of_an_earlier_save(folder: Path, record: Manifest) -> None:
    _rewrite(folder / MARKER, b'{"global_step": 6}', -60)
    kinds = {kind for kind, _ in found(manifest.check(folder).problems)}
    assert kinds == {K.MARKER_DIFFERS, K.MANIFEST_NEWER_THAN_MARKER, K.CHECKSUM_DIFFERS}


def test_the_same_marker_with_an_earlier_time_is_no_problem(folder: Path, record: Manifest) -> None:
    _rewrite(folder / MARKER, FILES[MARKER], -60)
    assert manifest.check(folder).ok


def test_a_copy_without_times_is_judged_by_content_only(folder: Path, record: Manifest) -> None:
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    os.utime(copy / MARKER)
    assert manifest.check(copy).ok


def test_a_copy_with_times_is_judged_by_them(folder: Path, record: Manifest) -> None:
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    assert manifest.check(copy).ok
    _rewrite(copy / MARKER, FILES[MARKER], 60)
    assert found(manifest.check(copy).problems) == [(K.MARKER_NEWER_THAN_MANIFEST, MARKER)]


def test_a_clock_that_was_behind_the_file_server(folder: Path) -> None:
    later = (folder / MARKER).stat().st_mtime_ns + 3600 * 10**9
    os.utime(folder / MARKER, ns=(later, later))
    manifest.commit(folder, manifest.describe(folder))
    assert manifest.check(folder).ok


def test_a_marker_without_checksum(folder: Path, record: Manifest) -> None:
    assert record.commit_marker is not None
    marker = record.commit_marker.model_copy(update={"sha256": None})
    without = record.model_copy(update={"commit_marker": marker})
    assert found(manifest.verify(folder, without)) == [(K.CHECKSUM_ABSENT, MARKER)]


# --------------------------------------------------------------------------------------------------
# Files that fight back


def test_a_file_that_changes_while_it_is_hashed(
    folder: Path, record: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hashing._sha256

    def hashed(descriptor: int, size_bytes: int, stop: threading.Event) -> tuple[str, int]:
        result = real(descriptor, size_bytes, stop)
        os.truncate(folder / "part-0.bin", size_bytes - 1)
        return result

    monkeypatch.setattr(hashing, "_sha256", hashed)
    assert (K.CHANGED_WHILE_READ, "part-0.bin") in found(
        manifest.audit(folder, record, workers=1).problems
    )


def test_a_file_that_shrinks_between_listing_and_hashing(
    folder: Path, record: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.open_inside

    def shrink_first(root: Path, relative: str) -> int:
        if relative == "part-0.bin":
            os.truncate(root / relative, 5)
        return real(root, relative)

    monkeypatch.setattr(files, "open_inside", shrink_first)
    assert found(manifest.verify(folder, record)) == [(K.CHANGED_WHILE_READ, "part-0.bin")]


def test_a_file_that_the_system_refuses_to_read(
    folder: Path, record: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, size_bytes: int, stop: threading.Event) -> tuple[str, int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashing, "_sha256", broken)
    problems = manifest.verify(folder, record)
    assert [p.kind for p in problems] == [K.UNREADABLE] * 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(folder: Path, record: Manifest) -> None:
    (folder / "part-0.bin").chmod(0)
    assert found(manifest.verify(folder, record)) == [(K.UNREADABLE, "part-0.bin")]


def test_a_huge_sparse_file_of_another_size_is_not_read(folder: Path, record: Manifest) -> None:
    os.truncate(folder / "part-0.bin", 1 << 40)
    audit = manifest.audit(folder, record)
    assert found(audit.problems) == [(K.SIZE_DIFFERS, "part-0.bin")]
    assert "part-0.bin" not in audit.hashed


def test_an_endless_file_is_left_after_its_size() -> None:
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    try:
        _, read_bytes = hashing._sha256(descriptor, 3 << 20, threading.Event())
    finally:
        os.close(descriptor)
    assert read_bytes <= 5 << 20


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "large", {"part.bin": b""})
    os.truncate(folder / "part.bin", 200 << 20)
    monkeypatch.setattr(helpers, "_MIN_TOTAL_BYTES", MANY)  # all of it in this process
    record = manifest.describe(folder)
    tracemalloc.start()
    try:
        assert manifest.verify(folder, record) == ()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("workers", [1, 3, None])
def test_a_defect_in_a_worker_is_raised(
    folder: Path, record: Manifest, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(descriptor: int, size_bytes: int, stop: threading.Event) -> tuple[str, int]:
        raise ZeroDivisionError

    monkeypatch.setattr(hashing, "_sha256", defective)
    with pytest.raises(ZeroDivisionError):
        manifest.audit(folder, record, workers=workers)


def test_many_files_on_many_workers(tmp_path: Path) -> None:
    folder = make(tmp_path / "many", {f"{i % 7}/{i}": b"x" * (i * 37) for i in range(300)})
    record = manifest.describe(folder, workers=8)
    assert manifest.verify(folder, record, workers=8) == ()
    assert record == manifest.describe(folder, workers=1)


# Signals reach the main thread only, which a test need not run in.
INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from ckptdrill import manifest
from ckptdrill.manifest import hashing

folder, real, read = Path(sys.argv[1]), hashing._sha256, []
record = manifest.describe(folder)

def interrupted(descriptor, size_bytes, stop):
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.wait(20)
    read.append(real(descriptor, size_bytes, stop)[1])
    return "", size_bytes

hashing._sha256 = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
try:
    manifest.audit(folder, record, workers=1)
except KeyboardInterrupt:
    deadline = time.monotonic() + 20
    while not read and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was only just starting is not waited for
    sys.exit(0 if read == [0] else 3)
"""


def test_an_interrupt_does_not_wait_for_the_file(folder: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", range(20))
def test_a_mutated_manifest_is_a_finding_and_never_a_crash(
    folder: Path, record: Manifest, seed: int
) -> None:
    draw = random.Random(seed)
    whole = manifest.path_of(folder).read_bytes()
    for _ in range(20):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice([0, 1, 1, 40])] = draw.choice(
                [b"", b"\0", b'"', b"{", b"-1", b"../", b"9" * 30, bytes([draw.randrange(256)])]
            )
        manifest.path_of(folder).write_bytes(data)
        audit = manifest.check(folder)
        assert all(str(problem).isprintable() for problem in audit.problems)
        assert audit.ok or audit.problems[0].kind in ProblemKind


# --------------------------------------------------------------------------------------------------
# Samples


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = make(tmp_path / "many", {f"{i}.bin": bytes([i]) * 1000 for i in range(100)})
    manifest.commit(folder, manifest.describe(folder))
    return folder


def test_a_sample_reads_its_share_and_says_what_it_left_out(many: Path) -> None:
    audit = manifest.check(many, sample=Sample(0.05, "monday"))
    assert audit.ok
    assert sum(audit.hashed.values()) == 5000
    assert len(audit.unread) == 95
    assert not audit.hashed.keys() & audit.unread.keys()


def test_the_same_seed_draws_the_same_files(many: Path) -> None:
    def drawn(seed: str) -> set[str]:
        return set(manifest.check(many, sample=Sample(0.05, seed)).hashed)

    assert drawn("monday") == drawn("monday") != drawn("tuesday")


def test_a_sample_finds_what_it_reads_and_no_more(many: Path) -> None:
    drawn = next(iter(manifest.check(many, sample=Sample(0.05, "monday")).hashed))
    (many / drawn).write_bytes(b"y" * 1000)
    problems = found(manifest.check(many, sample=Sample(0.05, "monday")).problems)
    assert problems == [(K.CHECKSUM_DIFFERS, drawn)]
    assert manifest.check(many, sample=Sample(0, "monday")).ok
    assert not manifest.check(many, sample=Sample(1, "monday")).ok


def test_a_sample_compares_all_sizes_and_the_marker(folder: Path, record: Manifest) -> None:
    _truncate(folder)
    (folder / MARKER).write_bytes(b'{"global_step": 1}')
    problems = found(manifest.audit(folder, record, sample=Sample(0)).problems)
    assert problems == [
        (K.MARKER_DIFFERS, MARKER),
        (K.SIZE_DIFFERS, "part-0.bin"),
        (K.CHECKSUM_DIFFERS, MARKER),
    ]


# --------------------------------------------------------------------------------------------------
# One file


def test_a_checkpoint_of_one_file_under_any_name(torch_save_file: Path) -> None:
    record = manifest.commit(torch_save_file, manifest.describe(torch_save_file))
    assert manifest.path_of(torch_save_file).name == "step-1.pt.manifest.json"
    assert manifest.check(torch_save_file).ok
    copy = torch_save_file.with_name("copy.pt")
    shutil.copyfile(torch_save_file, copy)
    assert manifest.verify(copy, record) == ()
    os.truncate(copy, 100)
    assert found(manifest.verify(copy, record)) == [(K.SIZE_DIFFERS, "copy.pt")]


def test_a_damaged_copy_beside_a_manifest_kept_elsewhere(dcp_folder: Path, tmp_path: Path) -> None:
    record = manifest.describe(dcp_folder)
    manifest.write(tmp_path / "kept.json", record)
    copy = Path(shutil.copytree(dcp_folder, tmp_path / "damaged"))
    assert manifest.verify(copy, manifest.read(tmp_path / "kept.json")) == ()
    (copy / "__0_0.distcp").unlink()
    assert found(manifest.verify(copy, record)) == [(K.MISSING, "__0_0.distcp")]
    assert not manifest.path_of(dcp_folder).exists()


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint at"):
        manifest.check(tmp_path / "nothing")


def test_a_step_that_the_files_contradict(folder: Path) -> None:
    honest = manifest.describe(folder)
    assert honest.completed_step == 7
    (problem,) = manifest.verify(folder, honest.model_copy(update={"completed_step": 8}))
    said = "recorded step 8, trainer_state.json says 7"
    assert (problem.kind, problem.explanation) == (K.STATE_DIFFERS, said)
    assert manifest.verify(folder, honest.model_copy(update={"completed_step": None})) == ()


def test_a_format_is_compared_where_no_digest_says_more(tmp_path: Path) -> None:
    path = samples.safetensors(tmp_path / "model.safetensors", samples.training())
    other = manifest.describe(path).model_copy(update={"format": "dcp"})
    assert manifest.verify(path, other) == ()
    bare = other.model_copy(update={"state_keys_sha256": None, "shapes_sha256": None})
    (problem,) = manifest.verify(path, bare)
    said = "recorded format dcp, found safetensors"
    assert (problem.kind, problem.explanation) == (K.STATE_DIFFERS, said)


@pytest.mark.parametrize("field", ["state_keys_sha256", "shapes_sha256"])
def test_tensors_that_are_not_those_of_the_record(tmp_path: Path, field: str) -> None:
    path = samples.safetensors(tmp_path / "model.safetensors", samples.training())
    honest = manifest.describe(path)
    assert manifest.verify(path, honest) == ()
    (problem,) = manifest.verify(path, honest.model_copy(update={field: "0" * 64}))
    assert problem.kind is K.STATE_DIFFERS
    assert "0" * 64 in problem.explanation
    unknown = honest.model_copy(update={field: None})
    assert manifest.verify(path, unknown) == ()
