"""The warm parent: imports torch once, then every launch starts from a fork of it.

Imports are most of the time of a small launch. What is forked is not the ranks but the whole of
torchrun: the same agent, rendezvous, environment and exit codes as on the cold command line, with
one difference: where torchrun would execute an interpreter per rank, it hands that rank's
environment and arguments to a process that was forked before and has torch already. In order:

1. Import torch and the modules named in `preload.json`; check that this process has one thread and
   has not touched a GPU, since neither survives a fork; write `ready.json`.
2. Read launches from standard input, one `{"launch": PATH}` a line, until it closes.
3. Per launch fork a child, which becomes the launch's cage (see `cage`); the cage forks the agent;
   the agent, while it still has one thread, forks the blank ranks, and then runs torchrun's main.
4. A blank rank that receives its work becomes what `python -u -m ckptdrill_observer` would be.

What a fork cannot renew: the environment variables that were read at import, and the secret of
`hash(str)`, which all ranks of all launches of one parent share. Launches that differ in the former
run cold.

Run it as `python -m ckptdrill_observer.warm CONTROL_FOLDER [PARENT_PID]`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable, NoReturn

from . import cage

_IMPORTED_BY_EVERY_JOB = (
    "numpy",
    "torch",
    "torch._dynamo",  # the first optimizer of a job imports it
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.data",
)
_REAP_EVERY_S = 0.1
_CLOSE_LIMIT_S = 30.0
_RANK_COMMAND = ("-u", "-m", "ckptdrill_observer")


class RankProcess:
    """A forked rank, with as much of `subprocess.Popen` as torchrun's agent uses."""

    def __init__(self, pid: int, work: int) -> None:
        self.pid = pid
        self.args = list(_RANK_COMMAND)
        self.returncode: int | None = None
        self._work = work

    def begin(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        """Hand over the rank's work; it starts at once."""
        with os.fdopen(self._work, "w") as stream:
            json.dump({"arguments": arguments, "environment": dict(environment)}, stream)

    def poll(self) -> int | None:
        """The return code, negative for a signal, or None while the rank runs."""
        return self._collect(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """The return code.

        Raises subprocess.TimeoutExpired after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._collect(0 if end is None else os.WNOHANG) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return self.returncode or 0

    def send_signal(self, signal_number: int) -> None:
        """Signal the rank unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal_number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                signalled = os.WIFSIGNALED(status)
                self.returncode = -os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)
        return self.returncode


def main(argv: list[str]) -> int:
    """Serve launches until standard input closes: `CONTROL_FOLDER [PARENT_PID]`."""
    control = Path(argv[0])
    cage.die_with_parent(signal.SIGTERM, int(argv[1]) if len(argv) > 1 else os.getppid())
    # A cage that is itself killed leaves its processes to this one, which ends them.
    cage.become_subreaper()
    _hear_signals()
    started = time.monotonic()
    failed = preload(control / "preload.json")
    refusal = unfit()
    gc.freeze()  # collections in the forks leave these pages shared
    cage.write_json(
        control / "ready.json",
        {
            "error": refusal,
            "pid": os.getpid(),
            "import_s": time.monotonic() - started,
            "not_imported": failed,
        },
    )
    return 1 if refusal else _serve()


def _hear_signals() -> None:
    """Forks must not inherit that ckptdrill was started in the background, with these ignored."""
    for number in cage.IGNORED_IN_THE_BACKGROUND:
        if signal.getsignal(number) is signal.SIG_IGN:
            heard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, heard)


def preload(names_file: Path) -> list[str]:
    """Import what every job imports and the modules listed in `names_file`; what could not be."""
    listed = json.loads(names_file.read_bytes()) if names_file.exists() else []
    return [name for name in (*_IMPORTED_BY_EVERY_JOB, *listed) if not _importable(str(name))]


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except BaseException:
        return False
    return True


def unfit() -> str | None:
    """Why this process may not be forked into launches, or None when it may."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch cannot be imported"
    if torch.cuda.is_initialized() or _gpu_is_open():
        return "an imported module has initialised the GPU driver, which does not survive a fork"
    threads = thread_count()
    if threads != 1:
        return f"the imported modules started {threads - 1} threads, which do not survive a fork"
    handlers = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    if not hasattr(getattr(handlers, "SubprocessHandler", None), "_popen"):
        return "this version of torch starts its ranks in a way that cannot be forked"
    return None


def _gpu_is_open() -> bool:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return any("/dev/nvidia" in _target(link) or "/dev/kfd" in _target(link) for link in links)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the descriptor of the listing itself has been closed
        return ""


def thread_count() -> int:
    """How many threads the kernel counts in this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Threads:")))


def _serve() -> int:
    cages: dict[int, Path] = {}
    for line in _requests(cages):
        launch_json = Path(json.loads(line)["launch"])
        refusal = unfit()
        if refusal:
            _write_missing_exit(launch_json, refusal)
        else:
            cages[_fork_cage(launch_json)] = launch_json
    _close(cages)
    return 0


def _requests(cages: dict[int, Path]) -> Iterator[bytes]:
    """The lines of standard input as they come; ended cages are reaped in between."""
    pending = b""
    while True:
        _reap(cages)
        readable, _, _ = select.select([0], [], [], _REAP_EVERY_S)
        if not readable:
            continue
        received = os.read(0, 65536)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        yield from lines


def _reap(cages: dict[int, Path]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            launch_json = cages.pop(pid, None)
            _end_orphans(cages)
            if launch_json is not None:
                _write_missing_exit(launch_json, "cage died")


def _end_orphans(cages: Mapping[int, Path]) -> None:
    """Kill what a killed cage left: every child of this process that is not a cage."""
    below = cage.descendants(os.getpid())
    kept = set(cages)
    for process in below:  # parents come before their children
        if process.pid in kept or process.parent in kept:
            kept.add(process.pid)
        else:
            cage.send_signal(process, signal.SIGKILL)


def _write_missing_exit(launch_json: Path, error: str) -> None:
    launch = json.loads(launch_json.read_bytes())
    folder = Path(launch["folder"])
    target = folder / "exit.json"
    if not target.exists():
        cage.remove_scratch(folder)
        cage.write_json(target, cage.exit_record(launch, time.time(), cage.Ending(error=error)))


def _close(cages: dict[int, Path]) -> None:
    for pid in cages:
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + _CLOSE_LIMIT_S
    while cages and time.monotonic() < end:
        _reap(cages)
        time.sleep(0.01)


def _fork_cage(launch_json: Path) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = launch_json.parent / "cage.log"
        cage.redirect(log, log)
        _close_descriptors()
        code = cage.own(launch_json, parent_pid, become_agent)
    except BaseException:
        traceback.print_exc()
    finally:
        # The child may never return into the loop that serves launches.
        os._exit(code)


def _close_descriptors(keep: int = -1) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def become_agent(launch: Mapping[str, Any], environment: Mapping[str, str]) -> NoReturn:
    """Be torchrun for `launch`, in this process, with ranks that are forked instead of executed."""
    _take_environment(environment)
    _renew_output()
    blanks = [_fork_blank() for _ in range(launch["world_size"])]
    _hand_out(blanks)
    run = importlib.import_module("torch.distributed.run")
    sys.argv = [str(run.__file__), *cage.torchrun_arguments(launch)]
    os._exit(_exit_code(lambda: run.main(sys.argv[1:])))


def _take_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile.tempdir = None  # asked again, from TMPDIR


def _renew_output() -> None:
    """Unbuffered standard streams, as under `python -u`."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        stream = io.TextIOWrapper(
            io.FileIO(descriptor, "w", closefd=False),  # unbuffered, as CPython does
            encoding=old.encoding,
            errors=old.errors,
            write_through=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _hand_out(blanks: list[RankProcess]) -> None:
    handler = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    execute = handler.SubprocessHandler._popen

    def start(self: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
        # A wrapped command (a binding to NUMA nodes) needs its own process image: not forked.
        if not blanks or tuple(command[1:4]) != _RANK_COMMAND:
            return execute(self, command, environment)
        rank = blanks.pop(0)
        rank.begin(list(command[4:]), environment)
        return rank

    handler.SubprocessHandler._popen = start


def _fork_blank() -> RankProcess:
    """Fork a rank that waits for its work. Done before torchrun starts any thread."""
    agent_pid = os.getpid()
    receive, send = os.pipe()
    pid = os.fork()
    if pid:
        os.close(receive)
        return RankProcess(pid, send)
    code = 1
    try:
        cage.die_with_parent(signal.SIGKILL, agent_pid)
        os.setsid()  # torchrun signals a rank by its process group
        _close_descriptors(keep=receive)
        with os.fdopen(receive) as stream:
            work = stream.read()
        code = _exit_code(lambda: _be_rank(**json.loads(work))) if work else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_rank(arguments: list[str], environment: dict[str, str]) -> None:
    _take_environment(environment)
    _renew_output()
    _renew_random_state()
    # OpenMP read its variable when torch was imported. It may be a list, one number per level.
    threads = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads.isdigit():
        sys.modules["torch"].set_num_threads(int(threads))
    sys.argv = [str(Path(__file__).with_name("__main__.py")), *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    from .__main__ import main as observe

    observe(arguments)


def _renew_random_state() -> None:
    """Torch and NumPy seed themselves at import, so that every fork would draw alike: a job that
    forgot to seed would look reproducible. Python's own generator renews itself in a fork.
    """
    # Not torch.seed(): that seeds the GPU's generators too, which start from a constant.
    sys.modules["torch"].default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _exit_code(program: Callable[[], object]) -> int:
    """Run `program` to the exit code that the interpreter would end with."""
    try:
        result = program()
        code = result if isinstance(result, int) else 0
    except SystemExit as leaving:
        code = _code_of(leaving.code)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _code_of(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
