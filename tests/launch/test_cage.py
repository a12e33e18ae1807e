"""The cage keeps what it promises: whatever a launch does, it ends, is recorded, and nothing stays.

Torchrun is replaced by a bare interpreter in all but two tests: the cage cannot tell.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.errors import UserError
from ckptdrill.launch.local import start_cold
from ckptdrill.observer import cage

ROOT = Path(__file__).parents[2]

# Ranks in sessions of their own, as torchrun's are; each announces itself and arms its stack dump.
RANKS = """
import faulthandler, json, os, signal, sys, time
def fact(rank, kind, **data):
    with open(f"rank{rank}.jsonl", "a") as stream:
        stream.write(json.dumps({"fact": kind, **data}) + "\\n")
def start(rank, work):
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    faulthandler.register(signal.SIGRTMIN + 1, file=open(f"rank{rank}.stacks", "w"))
    fact(rank, "started", pid=os.getpid())
    work()
    fact(rank, "exited", code=0)
    os._exit(0)
def hang_in_a_named_function():
    time.sleep(1000)
"""

# Two forks and a session of its own: no parent, no group, no terminal leads back to the launch.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("daemon.pid", "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists("daemon.pid") or not open("daemon.pid").read():
    time.sleep(0.01)
"""


pytestmark = pytest.mark.e2e


def test_a_launch_that_ends_is_recorded_with_its_output_in_files(bench: Any) -> None:
    program = "import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(7)"
    ended = bench.run(program)
    assert (ended["returncode"], ended["signal"], ended["error"]) == (7, None, None)
    assert not ended["timed_out"]
    assert ended["orphans_killed"] == 0
    assert 0 < ended["wall_s"] < 10
    assert abs(ended["ended_s"] - ended["started_s"] - ended["wall_s"]) < 1
    assert bench.read("launcher.out") == "to stdout\n"
    assert bench.read("launcher.err") == "to stderr\n"
    assert not (bench.folder / "scratch").exists()
    assert bench.read("cage.log") == ""


def test_a_launch_sees_its_own_environment_folder_and_no_terminal(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUNNER", "1")
    program = (
        "import json, os, sys; "
        "print(json.dumps([dict(os.environ), os.getcwd(), sys.stdin.read(), os.getsid(0)]))"
    )
    bench.run(program, job_env={"MINE": "x", "CKPTDRILL_OTHER": "y"})
    environment, cwd, read, session = json.loads(bench.read("launcher.out"))
    assert environment["MINE"] == "x"
    assert not {"SECRET_OF_THE_RUNNER", "CKPTDRILL_OTHER"} & set(environment)
    assert environment["CKPTDRILL_LAUNCH"] == str(bench.folder / "launch.json")
    assert (cwd, read) == (str(bench.folder), "")
    assert session != os.getsid(0)


def test_a_launch_is_not_born_with_blocked_or_ignored_signals(bench: Any) -> None:
    # `cat` reports on itself: an interpreter would have changed its own signals by then.
    launch = bench.describe("", command=["cat", "/proc/self/status"])
    bench.finish(start_cold(launch, bench.pack))
    lines = bench.read("launcher.out").splitlines()
    masks = dict(line.split(":\t") for line in lines if line.startswith(("SigBlk", "SigIgn")))
    # Signals 32 and 33 are the C library's own: whoever ignored them, no program can hear them.
    of_the_library = 0b11 << 31
    assert {int(mask, 16) & ~of_the_library for mask in masks.values()} == {0}


def test_at_the_time_limit_every_rank_leaves_its_stacks_and_dies(bench: Any) -> None:
    program = RANKS + "for r in 0, 1: start(r, hang_in_a_named_function)\ntime.sleep(1000)"
    ended = bench.run(program, world_size=2, timeout_s=1.0)
    assert ended["timed_out"]
    assert ended["stacks_dumped"]
    assert (ended["returncode"], ended["signal"]) == (None, signal.SIGKILL)
    assert 1.0 <= ended["wall_s"] < 5.0
    for rank in 0, 1:
        assert "hang_in_a_named_function" in bench.read(f"rank{rank}.stacks")


def test_a_rank_that_cannot_answer_does_not_claim_stacks(bench: Any) -> None:
    program = (
        RANKS
        + "start(0, lambda: os.kill(os.getpid(), signal.SIGSTOP))\n"
        + "fact(1, 'started', pid=os.getpid())\ntime.sleep(1000)"
    )
    ended = bench.run(program, world_size=2, timeout_s=0.5)
    assert ended["timed_out"]
    assert not ended["stacks_dumped"]


def test_a_rank_that_ends_at_once_does_not_hide_one_that_hangs(bench: Any) -> None:
    program = (
        RANKS
        + "start(0, lambda: None)\npid = start(1, hang_in_a_named_function)\nos.waitpid(pid, 0)"
    )
    ended = bench.run(program, world_size=2, timeout_s=1.0)
    assert ended["timed_out"]
    assert ended["stacks_dumped"]
    assert bench.read("rank0.stacks") == ""
    assert "hang_in_a_named_function" in bench.read("rank1.stacks")


def test_a_launcher_that_lingers_after_every_rank_has_finished_is_ended(bench: Any) -> None:
    program = RANKS + "for r in 0, 1: start(r, lambda: None)\ntime.sleep(1000)"
    ended = bench.run(program, world_size=2, linger_s=0.5)
    assert ended["error"] == "lingered after every rank had finished"
    assert not ended["timed_out"]
    assert ended["wall_s"] < 5.0


def test_a_daemon_is_killed_and_counted(bench: Any) -> None:
    ended = bench.run(DAEMON)
    assert ended["returncode"] == 0
    assert ended["orphans_killed"] == 1


def test_processes_that_keep_forking_are_all_killed(bench: Any) -> None:
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    end = time.time() + 20
    while time.time() < end:       # each parent leaves at once, so the chain never has one
        if os.fork():
            os._exit(0)
        time.sleep(0.005)
    os._exit(0)
time.sleep(0.2)
"""
    ended = bench.run(program)
    assert ended["orphans_killed"] >= 1
    assert ended["error"] is None


def test_death_by_a_signal_is_recorded(bench: Any) -> None:
    ended = bench.run("import os; os.kill(os.getpid(), 11)")
    assert (ended["returncode"], ended["signal"], ended["timed_out"]) == (None, 11, False)


def test_a_launcher_that_signals_its_own_group_does_not_reach_the_cage(bench: Any) -> None:
    ended = bench.run("import os; os.killpg(0, 15)")
    assert (ended["signal"], ended["error"]) == (15, None)


def test_an_interpreter_that_does_not_exist_is_an_ending_with_a_reason(bench: Any) -> None:
    launch = bench.describe("", command=["/no/such/python"])
    ended = bench.finish(start_cold(launch, bench.pack))
    assert ended["returncode"] == 127
    assert "/no/such/python" in bench.read("launcher.err")


def test_a_working_directory_that_does_not_exist_is_the_users_error(bench: Any) -> None:
    launch = bench.describe("", cwd=str(bench.root / "nowhere"))
    with pytest.raises(UserError, match="nowhere"):
        start_cold(launch, bench.pack)


def test_output_of_any_size_goes_to_a_file_and_not_to_memory(bench: Any) -> None:
    size_bytes = 200 << 20
    program = f"import sys\nfor _ in range(200): sys.stdout.write('x' * {1 << 20})"
    running = bench.start(program)
    peak_bytes = 0
    while not running.poll():
        peak_bytes = max(peak_bytes, _peak_memory_bytes(running.owner.pid))
    assert (bench.folder / "launcher.out").stat().st_size == size_bytes
    assert 0 < peak_bytes < 60 << 20
    (bench.folder / "launcher.out").unlink()


def _peak_memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next((int(x.split()[1]) << 10 for x in status.splitlines() if "VmHWM" in x), 0)


def test_a_long_run_folder_leaves_room_for_a_socket(bench: Any) -> None:
    bench.folder = bench.root / ("long" * 30) / "launch"
    program = """
import os, socket, tempfile
path = os.path.join(tempfile.mkdtemp(prefix="pymp-"), "listener-abcdefgh")
socket.socket(socket.AF_UNIX).bind(path)
print(os.environ["TMPDIR"], os.path.realpath(path))
"""
    ended = bench.run(program)
    assert ended["returncode"] == 0, bench.read("launcher.err")
    short, real = bench.read("launcher.out").split()
    assert real.startswith(str(bench.folder / "scratch"))
    assert not os.path.lexists(short)
    assert not Path(short).parent.exists()
    assert not (bench.folder / "scratch").exists()


def test_terminate_ends_everything_and_says_so(bench: Any) -> None:
    running = bench.start(DAEMON + "time.sleep(1000)")
    bench.until((bench.folder / "daemon.pid").exists)
    running.terminate()
    ended = bench.finish(running)
    assert (ended["error"], ended["signal"]) == ("terminated", signal.SIGKILL)


def test_terminate_right_after_the_start_is_not_lost(bench: Any) -> None:
    running = bench.start("import time; time.sleep(1000)")
    running.terminate()
    assert bench.finish(running)["error"] in ("terminated", "cage died")


def test_nothing_survives_a_killed_cage(bench: Any) -> None:
    running = bench.start(DAEMON + "time.sleep(1000)")
    bench.until((bench.folder / "daemon.pid").exists)
    running.owner.kill()
    ended = bench.finish(running)
    assert ended["error"] == "cage died"
    assert ended["orphans_killed"] >= 1


def test_a_second_attempt_ends_the_first_and_starts_from_empty_files(bench: Any) -> None:
    first = bench.start(RANKS + "start(0, hang_in_a_named_function)\ntime.sleep(1000)")
    bench.until((bench.folder / "rank0.jsonl").exists)
    launch = {**first.launch, "command": ["echo", "second"]}
    ended = bench.finish(start_cold(launch, bench.pack))
    assert (ended["returncode"], ended["error"]) == (0, None)
    assert bench.read("launcher.out") == "second\n"
    assert not (bench.folder / "rank0.jsonl").exists()
    assert first.owner.wait() == 0


def test_nothing_survives_a_killed_runner(bench: Any) -> None:
    program = RANKS + "for r in 0, 1: start(r, hang_in_a_named_function)\n" + DAEMON
    command = [sys.executable, "-S", str(bench.folder / "program.py")]
    launch = bench.describe(program + "time.sleep(1000)", command=command)
    runner_program = (
        "import json, sys, time; from pathlib import Path; "
        "from ckptdrill.launch.local import start_cold; "
        "start_cold(json.loads(sys.argv[1]), Path(sys.argv[2])); time.sleep(1000)"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", runner_program, json.dumps(launch), str(bench.pack)], cwd=ROOT
    )
    bench.until(lambda: len(bench.alive()) == 6)  # runner, cage, launcher, two ranks, daemon
    bench.until((bench.folder / "daemon.pid").exists)
    runner.kill()
    runner.wait()
    bench.until(lambda: not bench.alive(), timeout_s=5.0)
    assert json.loads(bench.read("exit.json"))["error"] == "terminated"


def test_torchrun_and_its_ranks_do_not_survive_a_killed_cage(bench: Any) -> None:
    launch = bench.describe("import time; time.sleep(1000)", world_size=2)
    running = start_cold(launch, bench.pack)
    ranks = [bench.folder / "rank0.jsonl", bench.folder / "rank1.jsonl"]
    bench.until(lambda: all(path.exists() for path in ranks))
    # Not asked for the result: nobody sweeps, the kernel alone has to end them.
    running.owner.kill()
    running.owner.wait()
    bench.until(lambda: not bench.alive(), timeout_s=5.0)
    assert bench.finish(running)["error"] == "cage died"


def test_a_rank_whose_cage_is_gone_before_it_asked_dies_at_once(pack: Path) -> None:
    program = "from ckptdrill_observer.cage import die_with_parent; die_with_parent(); print('on')"
    environment = {"PYTHONPATH": str(pack), "CKPTDRILL_CAGE_PID": "4194304"}
    orphan = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert orphan.returncode == -signal.SIGKILL
    environment["CKPTDRILL_CAGE_PID"] = str(os.getpid())
    assert (
        subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode
        == 0
    )


def test_a_process_that_was_given_a_used_id_is_not_signalled() -> None:
    child = subprocess.Popen(["sleep", "100"])
    process = cage.read_process(child.pid)
    assert process is not None
    earlier = process._replace(start_ticks=process.start_ticks - 1)
    assert not cage.send_signal(earlier, signal.SIGKILL)
    assert child.poll() is None
    assert cage.send_signal(process, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_the_cage_itself_needs_no_package_and_starts_fast(bench: Any) -> None:
    began = time.monotonic()
    ended = bench.finish(start_cold(bench.describe("", command=["true"]), bench.pack))
    print(f"cage around `true`: {time.monotonic() - began:.2f} s")  # noqa: T201
    assert ended["returncode"] == 0


# --------------------------------------------------------------------------------------------------
# What a launch must not write

ATTACKS = Path(__file__).with_name("attacks.py")


def host_names_allowed() -> bool:
    """Whether this machine lets us give a process another host name."""
    pid = os.fork()
    if pid == 0:
        try:
            cage.rename_host("another")
        except OSError:
            os._exit(1)
        os._exit(0 if os.uname().nodename == "another" else 1)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(not host_names_allowed(), reason="this machine allows no host name of our own")
def test_a_launch_sees_another_host_name_and_nobody_else_does(bench: Any) -> None:
    ours = os.uname().nodename
    ended = bench.run("import os; print(os.uname().nodename)", hostname="new")
    assert ended["returncode"] == 0
    assert bench.read("launcher.out") == "new\n"
    assert os.uname().nodename == ours


def namespaces_allowed() -> bool:
    """Whether this machine lets us have a mount namespace at all: a container may not."""
    pid = os.fork()
    if pid == 0:
        try:
            cage.bind_read_only(["/tmp"])
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


needs_namespaces = pytest.mark.skipif(
    not namespaces_allowed(), reason="this machine allows no mount namespace"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "shard").write_bytes(b"state")
    return folder


def attack(bench: Any, checkpoint: Path, **keys: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """What exit.json says, and what came of every attempt, made by a child of the launcher."""
    command = ["-S", str(ATTACKS), str(checkpoint), "shard"]
    program = f"import subprocess, sys; subprocess.run([sys.executable, *{command!r}])"
    ended = bench.run(program, **keys)
    return ended, json.loads(bench.read("outcomes.json"))


@needs_namespaces
def test_what_is_out_of_reach_is_read_only_for_everything_a_launch_starts(
    bench: Any, checkpoint: Path
) -> None:
    absent = str(checkpoint.with_name("absent"))
    ended, outcomes = attack(bench, checkpoint, read_only=[str(checkpoint), absent])
    assert (ended["bound_read_only"], ended["bind_refused"]) == (1, None)
    assert {name for name, outcome in outcomes.items() if outcome == "done"} == {"own"}
    assert sorted(path.name for path in checkpoint.iterdir()) == ["shard"]
    assert (checkpoint / "shard").read_bytes() == b"state"
    assert str(checkpoint) not in Path("/proc/self/mountinfo").read_text()


def test_without_a_word_nothing_is_out_of_reach(bench: Any, checkpoint: Path) -> None:
    ended, outcomes = attack(bench, checkpoint)
    assert (ended["bound_read_only"], ended["bind_refused"]) == (0, None)
    assert set(outcomes.values()) == {"done", "No such file or directory"}
    assert outcomes["write"] == outcomes["move the folder"] == outcomes["own"] == "done"


def test_a_launch_runs_without_what_the_kernel_refuses(bench: Any, checkpoint: Path) -> None:
    nowhere = checkpoint / "nowhere"
    nowhere.symlink_to("absent")
    ended, outcomes = attack(bench, checkpoint, read_only=[str(checkpoint), str(nowhere)])
    assert ended["returncode"] == 0
    assert ended["bound_read_only"] == 0
    assert ended["bind_refused"]
    assert outcomes["write"] == "done"


@needs_namespaces
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_somebody_without_rights_keeps_the_own_name_behind_the_binds() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "source").mkdir(mode=0o777)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                cage._prctl(4, 1)  # dumpable again, as after an exec: /proc/self is ours
                cage.bind_read_only([str(folder / "source")])
                (folder / "own").touch()
                assert (os.getuid(), os.getgid()) == (65534, 65534)
                assert (folder / "own").stat().st_uid == 65534
                with pytest.raises(OSError, match="Read-only"):
                    (folder / "source" / "x").touch()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert (folder / "own").stat().st_uid == 65534
