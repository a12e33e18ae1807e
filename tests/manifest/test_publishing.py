"""A publish that is cut off at any file operation leaves an older or a newer whole checkpoint.

The publisher runs in a forked process that kills itself with SIGKILL at its n-th file operation,
for every n until it gets to its end; a write is also torn in the middle. After each kill, `select`
must return the old generation or the new one, with its content; then the same publish once more has
to complete. A kill is not a power loss: for that, the order of fsync and rename is held by a test
of its own.
"""

import fcntl
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import manifest
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.manifest import Facts, Pointing, ProblemKind, Standing, Status, files
from tests.manifest.folders import FILES, make

# What a publish does to a file system; of `open`, only what may write counts.
OPERATIONS = (
    "chmod",
    "copy_file_range",
    "fsync",
    "link",
    "mkdir",
    "open",
    "rename",
    "replace",
    "rmdir",
    "sendfile",
    "symlink",
    "unlink",
    "utime",
    "write",
)
NEW_FILES = {**FILES, "part-0.bin": b"new!" * 1000, "trainer_state.json": b'{"global_step": 8}'}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the committed generation `step-7` and a pointer to it."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    manifest.publish(make(tmp_path / "staged-7"), folder / "step-7")
    return folder


def staged(root: Path) -> Path:
    return make(root.parent / "staged-8", NEW_FILES)


def chosen(root: Path) -> str | None:
    selection = manifest.select(root)
    return selection.chosen.path.name if selection.chosen else None


# --------------------------------------------------------------------------------------------------
# Without a fault


def test_a_publish(root: Path) -> None:
    published = manifest.publish(staged(root), root / "step-8")
    assert published.manifest.status is Status.COMMITTED
    assert published.manifest.completed_step == 8
    assert published.manifest.storage.durable_commit_time_utc is not None
    assert published.pointer_moved
    assert (root / "latest").read_text() == "step-8\n"
    assert not staged_exists(root)
    assert manifest.check(root / "step-8").ok
    selection = manifest.select(root)
    assert {g.path.name: g.standing for g in selection.generations} == {
        "step-8": Standing.CHOSEN,
        "step-7": Standing.OLDER,
    }
    assert [pointer.pointing for pointer in selection.pointers] == [Pointing.RIGHT]
    assert sorted(path.name for path in root.iterdir()) == [
        ".publish.lock",
        "latest",
        "step-7",
        "step-8",
    ]


def staged_exists(root: Path) -> bool:
    return (root.parent / "staged-8").exists()


def test_one_file(root: Path, torch_save_file: Path) -> None:
    manifest.publish(torch_save_file, root / "step-9.pt", Facts(completed_step=9))
    assert chosen(root) == "step-9.pt"
    assert not torch_save_file.exists()
    assert (root / "step-9.pt.manifest.json").exists()


def test_a_dcp_folder_under_a_name_of_one_in_progress(root: Path, dcp_folder: Path) -> None:
    source = dcp_folder.rename(root / "step-9.in-progress")
    assert chosen(root) == "step-7"
    manifest.publish(source, root / "step-9", Facts(completed_step=9))
    assert chosen(root) == "step-9"


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system only")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


def test_from_another_file_system_it_is_copied(root: Path, other_file_system: Path) -> None:
    source = make(other_file_system / "staged-8", NEW_FILES)
    manifest.publish(source, root / "step-8")
    assert chosen(root) == "step-8"
    assert source.exists()
    assert manifest.check(root / "step-8").ok


def test_files_with_other_names_are_copied_so_that_nobody_writes_through(root: Path) -> None:
    source = staged(root)
    other_name = root.parent / "other-name"
    other_name.hardlink_to(source / "part-0.bin")
    manifest.publish(source, root / "step-8")
    other_name.write_bytes(b"overwritten" * 10)
    assert manifest.check(root / "step-8").ok
    assert not list(root.glob(".*publishing"))


def test_a_link_inside_is_published_as_it_is(root: Path) -> None:
    source = staged(root)
    (source / "link").symlink_to("part-0.bin")
    manifest.publish(source, root / "step-8")
    assert (root / "step-8/link").is_symlink()
    assert chosen(root) == "step-8"


def test_a_pointer_that_is_a_link_stays_one(root: Path) -> None:
    (root / "latest").unlink()
    (root / "latest").symlink_to("step-7")
    manifest.publish(staged(root), root / "step-8")
    assert str((root / "latest").readlink()) == "step-8"


def test_an_older_step_does_not_take_the_pointer(root: Path, tmp_path: Path) -> None:
    older = make(tmp_path / "staged-6", {**FILES, "trainer_state.json": b'{"global_step": 6}'})
    assert not manifest.publish(older, root / "step-6").pointer_moved
    assert (root / "latest").read_text() == "step-7\n"
    assert chosen(root) == "step-7"


@pytest.mark.parametrize("text", ["nothing", "../..", "\0", "a" * 5000, ""])
def test_a_pointer_that_lies_is_replaced(root: Path, text: str) -> None:
    (root / "latest").write_text(text)
    assert manifest.publish(staged(root), root / "step-8").pointer_moved


# --------------------------------------------------------------------------------------------------
# What is refused


def refused(root: Path, source: Path, target: Path, code: ExitCode, match: str) -> None:
    """Publishing is refused with that code, and the old generation is still the one."""
    with pytest.raises(UserError, match=match) as raised:
        manifest.publish(source, target)
    assert raised.value.code is code
    assert chosen(root) == "step-7"
    assert (root / "latest").read_text() == "step-7\n"


def test_a_committed_generation_is_never_replaced(root: Path) -> None:
    before = manifest.read(manifest.path_of(root / "step-7"))
    refused(root, staged(root), root / "step-7", ExitCode.USAGE, "a generation is never replaced")
    assert manifest.verify(root / "step-7", before) == ()
    assert staged_exists(root)


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_any_existing_target_is_left_alone(root: Path, what: str) -> None:
    target = root / "taken"
    if what == "folder":
        make(target, {"precious": b"x"})
    elif what == "file":
        target.write_bytes(b"precious")
    else:
        target.symlink_to("nowhere")
    refused(root, staged(root), target, ExitCode.USAGE, "exists")
    assert os.path.lexists(target)


def test_a_second_publisher_is_turned_away(root: Path) -> None:
    with (root / ".publish.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(root, staged(root), root / "step-8", ExitCode.USAGE, "another publish is at work")
    manifest.publish(root.parent / "staged-8", root / "step-8")
    assert chosen(root) == "step-8"


def test_of_two_publishers_at_once_one_wins(root: Path, tmp_path: Path) -> None:
    for step in range(100, 110):
        target = root / f"step-{step}"
        sources = [make(tmp_path / f"staged-{step}-{n}", NEW_FILES) for n in range(2)]
        children = [
            forked(partial(_try, source, target, Facts(checkpoint_id=f"publisher {n}")))
            for n, source in enumerate(sources)
        ]
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        assert codes == [0, 2]
        record = manifest.read(manifest.path_of(target))
        winner = int((record.checkpoint_id or "").split()[1])
        assert [source.exists() for source in sources] == [winner == 1, winner == 0]
        assert manifest.check(target).ok


def _try(source: Path, target: Path, facts: Facts) -> None:
    try:
        manifest.publish(source, target, facts)
    except UserError as error:
        os._exit(error.code)


def test_a_missing_shard(root: Path, dcp_folder: Path) -> None:
    next(dcp_folder.glob("*.distcp")).unlink()
    refused(root, dcp_folder, root / "step-9", ExitCode.UNSUPPORTED, "own index names it")
    assert not (root / "step-9").exists()


def test_a_torn_shard(root: Path, dcp_folder: Path) -> None:
    os.truncate(next(dcp_folder.glob("*.distcp")), 100)
    refused(root, dcp_folder, root / "step-9", ExitCode.UNSUPPORTED, "ends before")


def test_what_its_writer_expects(root: Path) -> None:
    source = staged(root)
    expected = manifest.describe(source, Facts(completed_step=8), status=Status.IN_PROGRESS)
    manifest.write(manifest.path_of(source), expected)
    (source / "part-0.bin").write_bytes(b"x" * 4000)
    refused(root, source, root / "step-8", ExitCode.UNSUPPORTED, "checksum-differs: part-0")
    (source / "part-0.bin").write_bytes(NEW_FILES["part-0.bin"])
    manifest.publish(source, root / "step-8")
    assert chosen(root) == "step-8"


def test_the_facts_of_its_writer_stand_under_those_given(root: Path) -> None:
    source = staged(root)
    facts = Facts(checkpoint_id="run/8", omitted_state=("rng",))
    manifest.write(
        manifest.path_of(source), manifest.describe(source, facts, status=Status.IN_PROGRESS)
    )
    given = Facts(checkpoint_id="run/eight", completed_step=8)
    record = manifest.publish(source, root / "step-8", given).manifest
    assert (record.checkpoint_id, record.omitted_state) == ("run/eight", ("rng",))


def test_a_torn_manifest_of_its_writer(root: Path) -> None:
    source = staged(root)
    manifest.path_of(source).write_text("{")
    refused(root, source, root / "step-8", ExitCode.UNSUPPORTED, "manifest-unreadable")


def test_a_pipe(root: Path) -> None:
    source = staged(root)
    os.mkfifo(source / "pipe")
    refused(root, source, root / "step-8", ExitCode.UNSUPPORTED, "neither a file nor a folder")


def test_a_link_that_leads_out(root: Path) -> None:
    source = staged(root)
    (source / "link").symlink_to("/etc/passwd")
    refused(root, source, root / "step-8", ExitCode.UNSUPPORTED, "leads out")


def test_a_writer_that_goes_on_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = staged(root)
    real = manifest.sidecar.write

    def write(path: Path, record: manifest.Manifest) -> None:
        if record.status is Status.IN_PROGRESS:
            (source / "part-0.bin").write_bytes(b"late" * 1000)
        real(path, record)

    monkeypatch.setattr(manifest.sidecar, "write", write)
    refused(root, source, root / "step-8", ExitCode.UNSUPPORTED, "a file changed while")


@pytest.mark.parametrize(
    ("source", "target", "match"),
    [
        ("nothing", "checkpoints/step-8", "no checkpoint at"),
        ("staged-8", "nowhere/step-8", "no folder"),
        ("staged-8", "staged-8/inside", "would lie inside"),
    ],
)
def test_paths_that_make_no_sense(root: Path, source: str, target: str, match: str) -> None:
    staged(root)
    top = root.parent
    refused(root, top / source, top / target, ExitCode.USAGE, match)


@pytest.mark.parametrize("make_other", [Path.mkdir, os.mkfifo])
def test_something_else_called_latest(root: Path, make_other: Callable[[Path], None]) -> None:
    (root / "latest").unlink()
    make_other(root / "latest")
    with pytest.raises(UserError, match="is neither a file nor a link"):
        manifest.publish(staged(root), root / "step-8")
    assert staged_exists(root)


@pytest.mark.parametrize("operation", ["rename", "replace", "fsync", "write"])
def test_a_disk_that_refuses(root: Path, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, operation, full)
        with pytest.raises(UserError, match="No space left on device"):
            manifest.publish(staged(root), root / "step-8")
    assert chosen(root) == "step-7"


# --------------------------------------------------------------------------------------------------
# Killed at every file operation


def killed_at(number: int, *, torn: bool, publish: Callable[[], object]) -> bool:
    """Run `publish` in a child that kills itself before its `number`-th file operation (a torn
    write: after half of it); whether it was killed.
    """

    def work() -> None:
        _arm(number, torn=torn)
        publish()

    child = forked(work)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def forked(work: Callable[[], object]) -> int:
    """A child that does `work` and exits with 0, or with 1 when it raises; its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside the threads of xdist
        child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def _arm(number: int, *, torn: bool) -> None:
    count = 0

    def armed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += name != "open" or bool(args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
            if count >= number:
                if torn and name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, armed(name, getattr(os, name)))


def _whole(root: Path) -> str:
    """The name of the selected generation, once its content is that of one of the two."""
    name = chosen(root)
    step = {"step-7": FILES, "step-8": NEW_FILES}[name or ""]
    for path, data in step.items():
        assert (root / (name or "") / path).read_bytes() == data
    return name or ""


@pytest.mark.parametrize(("hard_linked", "torn"), [(False, False), (False, True), (True, False)])
def test_killed_at_every_operation(root: Path, *, hard_linked: bool, torn: bool) -> None:
    pristine = Path(shutil.copytree(root, root.parent / "pristine"))
    outcomes = []
    for number in range(1, 1000):
        shutil.rmtree(root)
        shutil.copytree(pristine, root)
        source = staged(root)
        if hard_linked:
            (root.parent / "other-name").unlink(missing_ok=True)
            (root.parent / "other-name").hardlink_to(source / "part-0.bin")

        def publish(source: Path = source) -> object:
            return manifest.publish(source, root / "step-8", workers=1)

        killed = killed_at(number, torn=torn, publish=publish)
        outcomes.append(_whole(root))
        assert (root / "latest").read_text() in ("step-7\n", f"{outcomes[-1]}\n")
        if not killed:
            break
        if not (root / "step-8").exists() or not source.exists():
            publish()
            assert _whole(root) == "step-8"
            assert (root / "latest").read_text() == "step-8\n"
        shutil.rmtree(source, ignore_errors=True)
    assert not killed
    assert len(outcomes) > 20
    turning = outcomes.index("step-8")
    assert outcomes == ["step-7"] * turning + ["step-8"] * (len(outcomes) - turning)
    assert 0 < turning < len(outcomes) - 1


def test_one_file_killed_at_every_operation(root: Path, torch_save_file: Path) -> None:
    data = torch_save_file.read_bytes()
    target = root / "step-9.pt"
    outcomes = []
    for number in range(1, 1000):
        for path in (target, manifest.path_of(target), root / "latest"):
            path.unlink(missing_ok=True)
        torch_save_file.write_bytes(data)

        def publish() -> object:
            return manifest.publish(torch_save_file, target, Facts(completed_step=9), workers=1)

        killed = killed_at(number, torn=False, publish=publish)
        outcomes.append(chosen(root))
        if not killed:
            break
        publish()
        assert chosen(root) == target.name
        assert target.read_bytes() == data
    assert not killed
    assert len(outcomes) > 15
    assert set(outcomes) == {"step-7", "step-9.pt"}


def test_what_was_cut_off_and_then_damaged_is_not_continued(root: Path) -> None:
    source = staged(root)
    number = next(
        n
        for n in range(1, 1000)
        if killed_at(n, torn=False, publish=lambda: manifest.publish(source, root / "step-8"))
        and (root / "step-8").exists()
    )
    assert number
    assert manifest.read(manifest.path_of(root / "step-8")).status is Status.IN_PROGRESS
    (root / "step-8/part-0.bin").write_bytes(b"x" * 4000)
    refused(root, source, root / "step-8", ExitCode.UNSUPPORTED, "checksum-differs: part-0")


# --------------------------------------------------------------------------------------------------
# Power loss: what is not durable yet must not be relied on


def test_everything_is_durable_before_the_manifest_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace: list[tuple[str, str]] = []

    def spied(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **kwargs: Any) -> Any:
            if isinstance(first, int):
                subject = str(Path(f"/proc/self/fd/{first}").readlink())
            else:
                subject = str(rest[0])
            trace.append((name, os.path.relpath(subject, root)))
            return real(first, *rest, **kwargs)

        return call

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, spied(name, getattr(os, name)))
    manifest.publish(staged(root), root / "step-8", workers=1)
    assert trace[trace.index(("rename", "step-8")) :] == [
        ("rename", "step-8"),
        ("fsync", ".."),
        ("fsync", "step-8/checkpoint.manifest.json"),
        ("fsync", "step-8/part-0.bin"),
        ("fsync", "step-8/sub/part-1.bin"),
        ("fsync", "step-8/trainer_state.json"),
        ("fsync", "step-8/sub"),
        ("fsync", "step-8"),
        ("fsync", "."),
        ("fsync", f"step-8/.checkpoint.manifest.json.{os.getpid()}.tmp"),
        ("replace", "step-8/checkpoint.manifest.json"),
        ("fsync", "step-8"),
        ("fsync", f".latest.{os.getpid()}.tmp"),
        ("replace", "latest"),
        ("fsync", "."),
    ]


def test_the_opener_and_the_lister_agree_on_what_is_a_file(root: Path) -> None:
    found = files.listing(root / "step-7")
    for path in found.files:
        os.close(files.open_inside(root / "step-7", path))
    assert ProblemKind.NOT_A_FILE not in {p.kind for p in manifest.check(root / "step-7").problems}
