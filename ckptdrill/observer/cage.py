"""The cage: one process that owns one launch and leaves no orphan.

Killing torchrun, or its process group, leaves its ranks alive: each sits in a session of its own.
A cage therefore becomes the reaper of every process below it and ends only when none is left.
In order:

1. Become a session leader and a child-subreaper, ask the kernel for SIGTERM when the parent dies,
   and write `cage.pid`.
2. Fork the launcher: its own session, output to files, SIGKILL when the cage dies, and a mount
   namespace in which the checkpoints of others are read-only, where the kernel allows one. Cold, it
   executes the command line of torchrun; warm, it already is the elastic agent (see `warm`).
3. Wait for the first of: the launcher ended, the time limit, SIGTERM, or a launcher that lingers
   although every rank has recorded that it finished.
4. Unless the launcher ended by itself, ask the living ranks for their stacks.
5. Kill every descendant, whatever session it moved to, until none is left; then write `exit.json`.

Run it as `python -I -S cage.py LAUNCH_JSON [PARENT_PID]`. It needs the standard library only and
runs alike in the runner's interpreter and in the job's. Besides the common keys, `launch.json` may
hold `command` (replaces the torchrun command line), `linger_s`, `read_only`, the paths that the
launch must not write to (those that are there yet), and `hostname`, what it is to take for the name
of its host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Callable, NamedTuple, NoReturn

# A rank answers this signal with the stacks of all its threads, in rank<R>.stacks.
STACKS_SIGNAL = signal.SIGRTMIN + 1
LINGER_S = 20.0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# What unshare(2) and mount(2) take: linux/sched.h, linux/mount.h.
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWUSER = 0x00020000, 0x04000000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 19
# What a mount has beside being writable, as statvfs(3) names it and as mount(2) does.
_MOUNT_FLAGS = ((2, 2), (4, 4), (8, 8), (1024, 1024), (2048, 2048), (4096, 1 << 21))
_TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WATCHED = (signal.SIGCHLD, *_TERMINATING)
_TICK_S = 0.25
_STACKS_WAIT_S = 2.0
# What a finished launcher leaves behind (a resource tracker, a loader's worker) may go by itself.
_LEAVE_GRACE_S = 0.5
_KILL_LIMIT_S = 15.0
# A Unix socket's path ends at 107 bytes; multiprocessing appends about 45 to TMPDIR.
_TMPDIR_BYTES_MAX = 60
IGNORED_IN_THE_BACKGROUND = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
# How torchrun names the rank that failed first; a negative code is the signal that ended it.
_FIRST_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
# Not the runner's TMPDIR, which may be long itself.
_SHORT_FOLDER = "/tmp"  # noqa: S108
_LAST_FACTS = ("exited", "stopped")

BecomeLauncher = Callable[[Mapping[str, Any], Mapping[str, str]], NoReturn]


class Process(NamedTuple):
    """One process as the kernel shows it; `start_ticks` tells a reused process id apart."""

    pid: int
    parent: int
    state: str
    start_ticks: int

    @property
    def alive(self) -> bool:
        """Not a zombie: still able to run."""
        return self.state not in "ZX"


class Ending(NamedTuple):
    """Why the wait for a launcher was over."""

    error: str | None = None
    timed_out: bool = False
    by_itself: bool = False


_BY_ITSELF = Ending(by_itself=True)
_TIMED_OUT = Ending(timed_out=True)
_TERMINATED = Ending(error="terminated")
_LINGERED = Ending(error="lingered after every rank had finished")


def torchrun_arguments(launch: Mapping[str, Any]) -> list[str]:
    """The arguments of `torch.distributed.run` for `launch`, equal in cold and warm launches.

    The local address is given because the name of the host need not resolve.
    """
    target = ["-m", launch["module"]] if launch.get("module") else [str(launch["program"])]
    options = {
        "--nproc-per-node": launch["world_size"],
        "--nnodes": 1,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "localhost:0",
        "--rdzv-id": launch["id"],
        "--local-addr": "127.0.0.1",
    }
    flags = [str(word) for option in options.items() for word in option]
    return [*flags, "-m", "ckptdrill_observer", *target, *(str(word) for word in launch["args"])]


def torchrun_command(launch: Mapping[str, Any]) -> list[str]:
    """The whole cold command line of `launch`."""
    return [launch["python"], "-m", "torch.distributed.run", *torchrun_arguments(launch)]


def die_with_parent(signal_number: int = signal.SIGKILL, parent_pid: int | None = None) -> None:
    """Ask the kernel for `signal_number` when the thread that forked this process ends.

    A parent that died before the request sends nothing, so that is checked afterwards: against
    `parent_pid`, or, in a rank, by looking for the cage among the ancestors. Never raises.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if parent_pid is None:
        cage_pid = int(os.environ.get("CKPTDRILL_CAGE_PID", "0"))
        orphaned = cage_pid > 0 and cage_pid not in _ancestors(os.getpid())
    else:
        orphaned = os.getppid() != parent_pid
    if orphaned:
        os.kill(os.getpid(), signal_number)


def become_subreaper() -> None:
    """Adopt every descendant whose parent dies. Linux only; elsewhere nothing happens."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def bind_read_only(paths: Iterable[str]) -> None:
    """Make `paths` read-only for this process and all that it starts, and for no other process.

    Root gets a mount namespace of its own. Anybody else needs a user namespace for that, in which
    the user and the group stay who they are; set-user-ID programs have no effect there. Raises
    OSError where the kernel or its settings do not allow it, and then this process must not go on:
    half a namespace may be worse than none.
    """
    _unshare(_CLONE_NEWNS)
    # What is mounted outside goes on to appear here; what is mounted here stays here.
    _mount(None, "/", _MS_REC | _MS_SLAVE)
    for path in paths:
        _mount(path, path, _MS_BIND | _MS_REC)
        # Flags that the mount had before may not be dropped in a user namespace.
        had = os.statvfs(path).f_flag
        kept = sum(mount_flag for flag, mount_flag in _MOUNT_FLAGS if had & flag)
        _mount(None, path, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)


def rename_host(name: str) -> None:
    """Let this process and all that it starts see `name` as that of their host, and nobody else.

    Raises OSError where the kernel or its settings do not allow it; then this process must not go
    on, as in `bind_read_only`.
    """
    _unshare(_CLONE_NEWUTS)
    encoded = name.encode()
    _libc("sethostname", encoded, ctypes.c_size_t(len(encoded)))


def _unshare(namespace: int) -> None:
    """A namespace of its own; who may not have one gets it inside a user namespace."""
    user, group = os.geteuid(), os.getegid()
    try:
        _libc("unshare", namespace)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        _libc("unshare", _CLONE_NEWUSER | namespace)
        _write_proc("setgroups", "deny")  # without it, nobody but root may map a group
        _write_proc("uid_map", f"{user} {user} 1")
        _write_proc("gid_map", f"{group} {group} 1")


def _mount(source: str | None, target: str, flags: int) -> None:
    from_path = None if source is None else os.fsencode(source)
    try:
        _libc("mount", from_path, os.fsencode(target), None, ctypes.c_ulong(flags), None)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {target}") from error


def _libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library that returns 0. Raises OSError when it does not."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _write_proc(name: str, text: str) -> None:
    Path(f"/proc/self/{name}").write_text(text)


def read_process(pid: int) -> Process | None:
    """The process with this id now, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may itself hold blanks and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]))


def _all_processes() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        process = read_process(int(entry)) if entry.isdigit() else None
        if process is not None:
            yield process


def _ancestors(pid: int) -> Iterator[int]:
    process = read_process(pid)
    while process is not None and process.parent > 0:
        yield process.parent
        process = read_process(process.parent)


def descendants(root_pid: int) -> list[Process]:
    """Every process below `root_pid`, zombies included, parents before children."""
    children: dict[int, list[Process]] = {}
    for process in _all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    pending = list(children.get(root_pid, ()))
    while pending:
        process = pending.pop()
        found.append(process)
        pending += children.get(process.pid, ())
    return found


def send_signal(process: Process, signal_number: int) -> bool:
    """Signal exactly this process, never one that has since been given its id."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        return _same(process) and _kill(process.pid, signal_number)
    try:
        if not _same(process):
            return False
        signal.pidfd_send_signal(handle, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def _same(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.start_ticks == process.start_ticks


def _kill(pid: int, signal_number: int) -> bool:
    try:
        os.kill(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_marked(launch_json: str) -> int:
    """Kill every process that was started with this launch in its environment; returns how many.

    For the runner, after a cage itself was killed: its orphans have left the tree by then.
    """
    mark = f"CKPTDRILL_LAUNCH={launch_json}".encode()
    killed: set[tuple[int, int]] = set()
    end = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < end:
        found = [p for p in _all_processes() if p.alive and mark in _environment_of(p.pid)]
        if not found:
            break
        killed |= {(p.pid, p.start_ticks) for p in found if send_signal(p, signal.SIGKILL)}
        time.sleep(0.01)
    return len(killed)


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `path` whole or not at all, and have it on disk before returning."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def exit_record(launch: Mapping[str, Any], started_s: float, ending: Ending) -> dict[str, Any]:
    """An `exit.json` in which nothing but the times and the ending is known yet."""
    ended_s = time.time()
    return {
        "launcher": launch.get("launcher", "torchrun"),
        "returncode": None,
        "signal": None,
        "timed_out": ending.timed_out,
        "started_s": started_s,
        "ended_s": ended_s,
        "wall_s": ended_s - started_s,
        "orphans_killed": 0,
        "stacks_dumped": False,
        "cage_pid": os.getpid(),
        "bound_read_only": None,
        "bind_refused": None,
        "error": ending.error,
    }


def own(launch_json: Path, parent_pid: int | None, become_launcher: BecomeLauncher) -> int:
    """Own the launch described at `launch_json` from its start to `exit.json`.

    `become_launcher(launch, environment)` is called in the forked launcher and must not return.
    Returns 0 when `exit.json` was written, whatever it says, and 1 when even that failed.
    """
    _enclose(parent_pid)
    started_s, started = time.time(), time.monotonic()
    launch = json.loads(launch_json.read_bytes())
    folder = Path(launch["folder"])
    reaped: dict[int, int] = {}
    try:
        record = _own(launch, folder, started_s, become_launcher, reaped)
    except Exception as error:
        traceback.print_exc()
        _kill_descendants(reaped)
        record = exit_record(launch, started_s, Ending(error=f"cage failed: {error!r}"))
    record["wall_s"] = time.monotonic() - started
    try:
        write_json(folder / "exit.json", record)
    except OSError:
        traceback.print_exc()
        return 1
    return 0


def _enclose(parent_pid: int | None) -> None:
    # Blocked first, so that a signal which arrives before the wait begins stays pending for it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    with contextlib.suppress(PermissionError):  # already a session leader
        os.setsid()
    become_subreaper()
    if parent_pid is not None:
        die_with_parent(signal.SIGTERM, parent_pid)


def _own(
    launch: Mapping[str, Any],
    folder: Path,
    started_s: float,
    become_launcher: BecomeLauncher,
    reaped: dict[int, int],
) -> dict[str, Any]:
    deadline = time.monotonic() + float(launch["timeout_s"])
    _write_pid(folder)
    with _scratch(folder, launch["env"]) as environment:
        launcher_pid, bound = _start_launcher(launch, folder, environment, become_launcher)
        ending = _wait(launch, folder, launcher_pid, deadline, reaped)
        orphans_killed, stacks_dumped = 0, False
        if ending.by_itself:
            _let_leave(reaped)
            orphans_killed = _kill_descendants(reaped)
        else:
            stacks_dumped = ending is not _TERMINATED and _dump_stacks(folder, launch["world_size"])
            _kill_descendants(reaped)
    record = exit_record(launch, started_s, ending)
    record.update(bound, orphans_killed=orphans_killed, stacks_dumped=stacks_dumped)
    record.update(_status(reaped.get(launcher_pid)))
    record["first_failure"] = _first_failure(folder / "launcher.err")
    if launcher_pid not in reaped or descendants(os.getpid()):
        record["error"] = f"a process could not be killed within {_KILL_LIMIT_S:.0f} s"
    return record


def _first_failure(errors: Path) -> dict[str, Any] | None:
    """The rank that torchrun saw failing first, and its exit code; ranks that are ended because of
    it leave no other word than that they lost it. A launcher that was ended at once said nothing.
    """
    if not errors.exists():
        return None
    with errors.open(encoding="utf-8", errors="replace") as lines:
        found = next(filter(None, map(_FIRST_FAILURE.search, lines)), None)
    if found is None:
        return None
    code = int(found[1])
    names = {member.value: member.name for member in signal.Signals}
    ended_by = names.get(-code, f"signal {-code}") if code < 0 else None
    return {"local_rank": int(found[2]), "exitcode": code, "signal": ended_by}


def _status(wait_status: int | None) -> dict[str, int | None]:
    if wait_status is None:
        return {}
    if os.WIFSIGNALED(wait_status):
        return {"signal": os.WTERMSIG(wait_status)}
    return {"returncode": os.WEXITSTATUS(wait_status)}


def _write_pid(folder: Path) -> None:
    cage = read_process(os.getpid())
    write_json(
        folder / "cage.pid",
        {"pid": os.getpid(), "start_ticks": cage.start_ticks if cage else 0},
    )


@contextlib.contextmanager
def _scratch(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The launch's environment with a TMPDIR of its own, removed afterwards.

    A TMPDIR that the job itself asks for is left alone. A long path goes behind a short link, or
    the sockets that multiprocessing makes there would not fit the kernel's limit.
    """
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    result = {**environment, "CKPTDRILL_CAGE_PID": str(os.getpid())}
    if result.setdefault("TMPDIR", str(scratch)) == str(scratch):
        result["TMPDIR"] = _short_path(scratch)
    try:
        yield result
    finally:
        remove_scratch(folder)


def remove_scratch(folder: Path) -> None:
    """Remove a launch's scratch folder and its short link, also after a cage that was killed."""
    scratch = folder / "scratch"
    for link in Path(_SHORT_FOLDER).glob("ckptdrill-*/t"):
        with contextlib.suppress(OSError):  # another cage has just removed its own
            if os.readlink(link) == str(scratch):
                shutil.rmtree(link.parent)
    shutil.rmtree(scratch, ignore_errors=True)


def _short_path(scratch: Path) -> str:
    if len(os.fsencode(scratch)) <= _TMPDIR_BYTES_MAX:
        return str(scratch)
    link = Path(tempfile.mkdtemp(prefix="ckptdrill-", dir=_SHORT_FOLDER)) / "t"
    link.symlink_to(scratch)
    return str(link)


def _start_launcher(
    launch: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str],
    become_launcher: BecomeLauncher,
) -> tuple[int, dict[str, Any]]:
    """The launcher's process id, and how many paths are read-only for it or why none is.

    What the kernel refuses is asked for once more without the name of the host (the facts of the
    ranks tell which they saw), then without anything.
    """
    paths = [path for path in launch.get("read_only") or () if os.path.lexists(path)]
    start = (launch, folder, environment, become_launcher)
    hostname = launch.get("hostname")
    refusal = None
    for view in ((paths, hostname), (paths, None)) if hostname else ((paths, None),):
        launcher_pid, refusal = _fork_launcher(*start, *view)
        if refusal is None:
            return launcher_pid, {"bound_read_only": len(paths), "bind_refused": None}
        os.waitpid(launcher_pid, 0)
    launcher_pid, _ = _fork_launcher(*start, (), None)
    return launcher_pid, {"bound_read_only": 0, "bind_refused": refusal}


def _fork_launcher(
    launch: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str],
    become_launcher: BecomeLauncher,
    read_only: Iterable[str],
    hostname: str | None,
) -> tuple[int, str | None]:
    """The launcher's process id; and why it has ended again, if `read_only` or the name of the host
    cannot be had.
    """
    cage_pid = os.getpid()
    answer, say = os.pipe()
    launcher_pid = os.fork()
    if launcher_pid:
        os.close(say)
        with os.fdopen(answer) as stream:
            return launcher_pid, stream.read() or None
    try:
        os.close(answer)
        if not _bound(read_only, hostname, say):
            os._exit(0)
        die_with_parent(signal.SIGKILL, cage_pid)
        # A launcher that signals its own group must not reach the cage.
        os.setsid()
        redirect(folder / "launcher.out", folder / "launcher.err")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(launch["cwd"])
        become_launcher(launch, environment)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(127)


def _bound(read_only: Iterable[str], hostname: str | None, say: int) -> bool:
    """Whether what was wanted read-only is, and the host has the wanted name; why not is written
    to the descriptor `say`.
    """
    with os.fdopen(say, "w") as stream:
        try:
            if read_only:
                bind_read_only(read_only)
            if hostname is not None:
                rename_host(hostname)
        except (OSError, AttributeError) as error:
            stream.write(str(getattr(error, "strerror", None) or error))
            return False
    return True


def redirect(output: Path, errors: Path) -> None:
    """Point the three standard descriptors at /dev/null and two files that grow by appending."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    opened = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(output, append, 0o644),
        os.open(errors, append, 0o644),
    )
    for target, source in enumerate(opened):
        os.dup2(source, target)
        if source > 2:
            os.close(source)


def _execute(launch: Mapping[str, Any], environment: Mapping[str, str]) -> NoReturn:
    # An ignored signal would stay ignored in the new program. Python ignores the first two, and
    # whoever starts ckptdrill in the background (nohup, cron, `&`) the others.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ, *IGNORED_IN_THE_BACKGROUND):
        signal.signal(ignored, signal.SIG_DFL)
    command = launch.get("command") or torchrun_command(launch)
    os.execvpe(command[0], command, environment)  # noqa: S606 - a fixed argv, no shell


def _wait(
    launch: Mapping[str, Any],
    folder: Path,
    launcher_pid: int,
    deadline: float,
    reaped: dict[int, int],
) -> Ending:
    lingers = _linger_clock(folder, launch["world_size"], launch.get("linger_s", LINGER_S))
    while True:
        _reap(reaped)
        if launcher_pid in reaped:
            return _BY_ITSELF
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return _TIMED_OUT
        if next(lingers):
            return _LINGERED
        caught = signal.sigtimedwait(_WATCHED, min(_TICK_S, left_s))
        if caught is not None and caught.si_signo in _TERMINATING:
            return _TERMINATED


def _linger_clock(folder: Path, world_size: int, linger_s: float) -> Iterator[bool]:
    """Yield True once every rank has been finished, by its own facts, for `linger_s`."""
    unfinished = set(range(world_size))
    while unfinished or not world_size:
        unfinished = {rank for rank in unfinished if not _finished(folder / f"rank{rank}.jsonl")}
        yield False
    end = time.monotonic() + linger_s
    while True:
        yield time.monotonic() >= end


def _finished(facts: Path) -> bool:
    """Whether a rank's last facts say that it exited or was stopped. Reads the tail only."""
    try:
        with facts.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 65536))
            tail = stream.read()
    except OSError:
        return False
    return any(_kind(line) in _LAST_FACTS for line in tail.splitlines()[-8:])


def _kind(line: bytes) -> str | None:
    try:
        fact = json.loads(line)
    except ValueError:
        return None
    return str(fact.get("fact")) if isinstance(fact, dict) else None


def _reap(reaped: dict[int, int]) -> bool:
    """Collect every child that has ended into `reaped`; whether any child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        reaped[pid] = status


def _let_leave(reaped: dict[int, int]) -> None:
    end = time.monotonic() + _LEAVE_GRACE_S
    while _reap(reaped) and time.monotonic() < end:
        time.sleep(0.01)


def _kill_descendants(reaped: dict[int, int]) -> int:
    """SIGKILL everything below until no child is left; how many were still alive when found.

    One pass is not enough: a process may fork between the look and the kill, and the children of
    a killed one come to this process only then. The limit is for what the kernel cannot end.
    """
    killed: set[tuple[int, int]] = set()
    end = time.monotonic() + _KILL_LIMIT_S
    while _reap(reaped) and time.monotonic() < end:
        for process in descendants(os.getpid()):
            if send_signal(process, signal.SIGKILL) and process.alive:
                killed.add((process.pid, process.start_ticks))
        time.sleep(0.005)
    return len(killed)


def _dump_stacks(folder: Path, world_size: int) -> bool:
    """Have every living rank write its stacks; True when all that were asked did."""
    below = {process.pid: process for process in descendants(os.getpid())}
    asked: dict[Path, int] = {}
    for rank in range(world_size):
        process = below.get(_started_pid(folder / f"rank{rank}.jsonl"))
        stacks = folder / f"rank{rank}.stacks"
        size_bytes = _size_bytes(stacks)
        if process and _answers(process) and send_signal(process, STACKS_SIGNAL):
            asked[stacks] = size_bytes
    return bool(asked) and _have_grown(asked)


def _started_pid(facts: Path) -> int:
    try:
        with facts.open("rb") as stream:
            for line in stream:
                if b'"started"' in line and _kind(line) == "started":
                    return int(json.loads(line).get("pid", 0))
    except (OSError, ValueError, TypeError):
        pass
    return 0


def _answers(rank: Process) -> bool:
    """Whether a rank handles the signal; without a handler it would kill the rank unheard."""
    try:
        status = Path(f"/proc/{rank.pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return rank.alive and bool(int(caught.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def _have_grown(files: Mapping[Path, int]) -> bool:
    """Wait until every file is longer than it was and has stopped growing."""
    end = time.monotonic() + _STACKS_WAIT_S
    before: list[int] = []
    while time.monotonic() < end:
        now = [_size_bytes(path) for path in files]
        if now == before and all(size > old for size, old in zip(now, files.values())):
            return True
        before = now
        time.sleep(0.1)
    return all(_size_bytes(path) > old for path, old in files.items())


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def main(argv: list[str]) -> int:
    """Own one cold launch: `LAUNCH_JSON [PARENT_PID]`."""
    parent_pid = int(argv[1]) if len(argv) > 1 else os.getppid()
    return own(Path(argv[0]), parent_pid, _execute)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
