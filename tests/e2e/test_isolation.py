"""Sources that are attacked by the jobs that restore them, and runs on disks that will not take
them.

Jobs are the script of a stranger with one hostile line. What they may not change stays bit for bit
what it was; what nothing can keep from them makes the whole run void.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
TRAIN = HERE / "user_script" / "train.py"
ATTACKS = HERE.parent / "launch" / "attacks.py"
ODD_NAMES = (b"new\nline", b"<script>alert(1)", b"\xff\xfe", b"back\\slash")
BALLAST_BYTES = 800_000
HUGE_BYTES = 1 << 28  # a hole: nothing is stored

# The run starts from a folder that says nothing of the training: the job goes on at step 4.
ARGS, STEP = "    args = get_args()\n", "    step, epoch, batches_done = 0, 0, 0\n"
START = """
    args = get_args()
    p = Path(args.resume) if args.resume else args.out
    begin = 4 if p.is_dir() and args.resume else 0
    {hostile}
    if begin:
        args.resume = None
"""
MATRIX = """
job:
  program: {name}.py
  args: [--out, "{{out}}", --no-augment]
  resume_args: [--resume, "{{resume}}"]
  checkpoint: "{{out}}/ckpt-{{step}}.pt"
  env: {{GIVEN: "{given}", ALIAS: "{alias}"}}
  start_from: {given}
  start_step: 4
  saves: [8]
  window: 2
  timeout_s: 120
repeats: 0
topologies:
  one: {{dp_replicate: 1}}
policy:
  out_of_scope:
    rng: without augmentation nothing is drawn
    data: two steps are enough here
    inventory: nothing is saved after the restore
matrix:
  - {{source: one, target: one}}
"""
# Attack what the run starts from, what the source has saved, and the copy that was made for this
# launch; each from a folder of its own below {out}.
VANDAL = f"""
    import subprocess, sys
    saved = args.out.parents[1] / "source.one" / "out"
    for name, folder, file in (
        ("given", os.environ["GIVEN"], "state.pt"),
        ("saved", saved, "ckpt-8.pt"),
        ("copy", p if p.is_dir() else p.parent, "state.pt" if p.is_dir() else p.name),
    ):
        if Path(folder) != args.out and (name != "copy" or p.is_dir()):
            (args.out / name).mkdir(parents=True)
            command = [sys.executable, "-S", {str(ATTACKS)!r}, folder, file]
            subprocess.run(command, cwd=args.out / name, check=True)
"""
ALIAS = """
    if args.resume and not p.is_dir():
        with open(os.environ["ALIAS"], "r+b") as stream:
            stream.write(b"X")
"""


def _namespaces() -> list[str] | None:
    """The start of a command line that has mounts of its own; None where there is no way."""
    for command in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return None


UNSHARE = _namespaces()
needs_namespaces = pytest.mark.skipif(
    UNSHARE is None, reason="this machine allows no mount namespace"
)


@pytest.fixture
def given(bench: Any) -> Path:
    """A checkpoint to start from, with whatever an ordinary folder may hold."""
    folder: Path = bench.folder / "given" / "step-4"
    folder.mkdir(parents=True)
    (folder / "state.pt").write_bytes(os.urandom(100_000))
    (folder / "twin").hardlink_to(folder / "state.pt")
    (folder / "link").symlink_to("state.pt")
    (folder / "loop").symlink_to(".")
    for name in ODD_NAMES:
        (folder / os.fsdecode(name)).write_bytes(name)
    with (folder / "huge").open("wb") as stream:
        stream.truncate(HUGE_BYTES)
    (folder / "state.pt").chmod(0o444)
    return folder


def _identity(root: Path) -> dict[bytes, tuple[int, int, int, bytes]]:
    """Size, mtime, inode and content of every file; links by what they say."""
    found = {}
    for path in (path for path in root.rglob("*") if path.is_symlink() or path.is_file()):
        status = path.lstat()
        content = os.fsencode(path.readlink()) if path.is_symlink() else _digest(path)
        key = (status.st_size, status.st_mtime_ns, status.st_ino, content)
        found[os.fsencode(path.relative_to(root))] = key
    return found


def _digest(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _write(bench: Any, name: str, given: Path, hostile: str = "pass") -> Path:
    """The script with hostile lines, and its matrix."""
    text = TRAIN.read_text()
    assert text.count(ARGS) == text.count(STEP) == 1
    text = text.replace(ARGS, START.format(hostile=hostile.strip()))
    text = text.replace(STEP, "    step, epoch, batches_done = begin, 0, begin\n")
    (bench.folder / f"{name}.py").write_text(text)
    alias = bench.folder / "alias"
    matrix: Path = bench.matrix(name, MATRIX.format(name=name, given=given, alias=alias))
    return matrix


def _outcomes(result: Any, launch: str) -> dict[str, set[str]]:
    """What each attack of a launch came to: target -> the attacks that were done."""
    out = result.root / "work" / launch / "out"
    files = {
        path.parent.name: json.loads(path.read_bytes()) for path in out.glob("*/outcomes.json")
    }
    return {name: {act for act in acts if acts[act] == "done"} for name, acts in files.items()}


@needs_namespaces
def test_a_source_that_is_attacked_stays_what_it_was(bench: Any, given: Path) -> None:
    before = _identity(given)
    result = bench.drill(_write(bench, "vandal", given, VANDAL), "--keep")
    assert _identity(given) == before
    assert result.code != 4, result.out + result.err
    assert result.about["source_unchanged"] is True
    source, restore = _outcomes(result, "source.one"), _outcomes(result, "restore.one.baseline")
    assert source["given"] == restore["given"] == restore["saved"] == {"own"}
    # The copies are the job's own: there it can do whatever it likes.
    assert {"write", "truncate", "rename", "move the folder"} <= source["copy"]
    packet = json.loads((result.root / "packet.json").read_bytes())
    assert [each["unchanged"] for each in packet["run"]["sources"]] == [True, True]
    launches = packet["cells"][0]["launches"]
    assert all("read-only-bind" in each["guard"] for each in launches)
    assert bench.ckptdrill("verify", result.root).code == 0


def test_a_source_that_is_changed_through_another_name_voids_the_run(
    bench: Any, given: Path
) -> None:
    (bench.folder / "alias").hardlink_to(given / "huge")
    result = bench.drill(_write(bench, "alias", given, ALIAS))
    assert result.code == 4, result.out + result.err
    assert f"VOID: a source checkpoint changed under the run ({given}: huge: " in result.out
    assert result.about["source_changes"] == [
        f"{given}: huge: content changed, while restore.one.baseline ran"
    ]
    packet = json.loads((result.root / "packet.json").read_bytes())
    assert packet["summary"]["exit_code"] == 4
    by_source = {each["of"]: each["unchanged"] for each in packet["run"]["sources"]}
    assert by_source == {"start_from": False, "source.one": True}
    assert "huge: content changed" in (result.root / "index.html").read_text()


def test_a_source_that_no_job_may_be_given_is_refused_before_anything_starts(
    bench: Any, given: Path
) -> None:
    os.mkfifo(given / "pipe")
    result = bench.drill(_write(bench, "pipe", given, VANDAL))
    assert result.code == 2, result.out + result.err
    assert "neither a file nor a folder nor a link" in result.err
    assert str(given / "pipe") in result.err
    assert result.root is not None
    assert not (result.root / "launches").exists()


# ------------------------------------------------------------------------ disks, folders, processes

# Fill a small disk, free it, go on; said as one JSON line per run.
FULL_DISK = """
import json, subprocess, sys
runs, command = sys.argv[1], sys.argv[2:]
def mount(*options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", *options, "tmpfs", runs], check=True)
def drill(*more):
    done = subprocess.run([*command, *more], capture_output=True, text=True)
    journal = subprocess.run(["cat", *map(str, __import__("pathlib").Path(runs).glob(
        "*/latest/journal.jsonl"))], capture_output=True, text=True).stdout
    print(json.dumps({"code": done.returncode, "out": done.stdout, "err": done.stderr,
                      "journal": journal}), flush=True)
mount("size=1600k")
drill()
mount("remount,size=256m")
drill("--resume")
"""


@needs_namespaces
def test_a_disk_that_fills_up_stops_the_run_and_it_goes_on_when_there_is_room(
    bench: Any,
) -> None:
    given = bench.folder / "step-4"
    given.mkdir()
    (given / "ballast").write_bytes(os.urandom(BALLAST_BYTES))
    matrix = _write(bench, "full", given)
    bench.runs.mkdir()
    command = [sys.executable, "-m", "ckptdrill", "run", matrix, "--runs", bench.runs]
    command += ["--launcher", "warm"]
    done = subprocess.run(
        [*(UNSHARE or []), sys.executable, "-c", FULL_DISK, bench.runs, *command],
        capture_output=True,
        text=True,
        cwd=bench.folder,
        timeout=300,
        check=True,
    )
    full, later = (json.loads(line) for line in done.stdout.splitlines())
    assert "Traceback" not in full["err"] + later["err"]
    assert full["code"] == 3, full
    told = ("No space left on device", "the disk was full", "MB are free")  # by who met it first
    assert any(text in full["err"] + full["out"] for text in told), full
    assert "--resume" in full["err"] + full["out"]
    assert later["journal"].startswith(full["journal"].rpartition("\n")[0])
    assert later["code"] == 0, later


@needs_namespaces
def test_a_folder_that_may_not_be_written_is_said_before_anything_starts(
    bench: Any, given: Path
) -> None:
    matrix = _write(bench, "closed", given, VANDAL)
    bench.runs.mkdir()
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    command = [sys.executable, "-m", "ckptdrill", "run", matrix, "--runs", bench.runs]
    done = subprocess.run(
        [*(UNSHARE or []), "sh", "-c", script, "sh", bench.runs, *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "Read-only file system" in done.stderr
    assert "--runs" in done.stderr
    assert list(bench.runs.iterdir()) == []


def test_a_run_has_one_writer_and_what_a_killed_one_took_down_with_it_has_not_run(
    bench: Any, given: Path
) -> None:
    matrix = _write(bench, "killed", given, "import time; time.sleep(1000)")
    process = bench.start(matrix)
    root = _wait_for(bench, "killed", "launches/source.one/rank0.jsonl")
    for refused in (bench.drill(matrix, "--resume"), bench.ckptdrill("judge", root)):
        assert refused.code == 2
        assert "another ckptdrill process is writing this run" in refused.err
    process.send_signal(signal.SIGKILL)
    process.wait()
    bench.nothing_stays()
    result = bench.ckptdrill("judge", root)
    assert result.code == 3, result.out + result.err
    (verdict,) = (json.loads(path.read_bytes()) for path in root.glob("cells/*/verdict.json"))
    assert (verdict["word"], verdict["reason"]) == ("Unproven", "not-run")
    assert verdict["explanation"] == "the run was stopped while this was running"


def _wait_for(bench: Any, matrix: str, name: str) -> Path:
    """The run folder, once a file is in it."""
    end = time.monotonic() + 120
    while True:
        root: Path | None = bench.newest(matrix)
        if root is not None and (root / name).exists():
            return root
        assert time.monotonic() < end, f"{name} never came"
        time.sleep(0.02)
