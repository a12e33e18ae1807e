"""Looks a machine over before the first run: what a drill needs, what is there, what to do.

`gather` asks the system and changes nothing (two files are written and removed below the folder of
runs); `findings` judges what it found, and is pure. torch is not imported: GPUs are asked by
nvidia-smi, the job's interpreter by its package metadata. A warning costs isolation, speed or room;
what is failing would end a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ckptdrill.errors import ExitCode
from ckptdrill.installed import installed
from ckptdrill.model import to_json
from ckptdrill.schedule import Capacity

_GIB = 1 << 30
_SHM = Path("/dev/shm")  # noqa: S108 - the shared memory of the system, only measured
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_TIMEOUT_S = 30
_LEAST_TORCH, _LEAST_PYTHON = (2, 4), (3, 9)
_FILES_NEEDED = 4096
# What a rank of a launch does with the sources, in a process of its own.
_BIND = """
import sys
from ckptdrill.observer import cage
cage.bind_read_only([sys.argv[1]])
try:
    open(sys.argv[1] + "/probe", "w")
except OSError:
    sys.exit(0)
sys.exit("the folder could still be written")
"""
_FICLONE = 0x40049409  # as in `isolate`


class Standing(StrEnum):
    """What a finding means for a run."""

    OK = "ok"
    WARNING = "warning"
    FAILING = "failing"


@dataclass(frozen=True)
class Finding:
    """One thing that a drill needs, how it is here, and the next move where it is not fine."""

    name: str
    standing: Standing
    found: str
    next_move: str = ""


@dataclass(frozen=True)
class Machine:
    """What was found, before any opinion. Sizes are in bytes, None is: not there, or not told.

    `limits` are soft limits of the process (None: unlimited); the texts say what the system said.
    """

    platform: str
    python: str
    packages: Mapping[str, str] | None
    gpus: tuple[str, ...]
    gpu_error: str | None
    devices: tuple[str, ...]
    cores: int
    memory_bytes: int | None
    runs: str
    runs_error: str | None
    free_bytes: int | None
    clones: bool
    shm_bytes: int | None
    limits: Mapping[str, int | None]
    port_error: str | None
    bind_error: str | None


def examine(python: str | None, runs: Path, *, as_json: bool) -> ExitCode:
    """Print every finding; UNSUPPORTED when one of them would end a run."""
    found = findings(gather(python or sys.executable, runs))
    if as_json:
        print(json.dumps(to_json(found), indent=1))  # noqa: T201 - the output of the verb
    else:
        for line in page(found):
            Console(soft_wrap=True).print(Text(line))
    failing = any(each.standing is Standing.FAILING for each in found)
    return ExitCode.UNSUPPORTED if failing else ExitCode.AS_EXPECTED


def page(found: Sequence[Finding]) -> Iterator[str]:
    """A line for each finding, the next move below it, and the sum."""
    width = max(len(each.name) for each in found)
    for each in found:
        yield f"{each.standing:<8} {each.name:<{width}}  {each.found}"
        if each.next_move:
            yield f"{'':<8} {'':<{width}}  next: {each.next_move}"
    counts = [sum(e.standing is s for e in found) for s in (Standing.FAILING, Standing.WARNING)]
    yield f"failing: {counts[0] or 'nothing'}; warnings: {counts[1] or 'none'}"


# --------------------------------------------------------------------------------------------------
# What is there


def gather(python: str, runs: Path) -> Machine:
    """Ask the system. Whatever it refuses is what was found."""
    gpus, gpu_error = _gpus()
    folder = _nearest(runs)
    writable, clones = _try_folder(folder)
    return Machine(
        platform=sys.platform,
        python=python,
        packages=installed(shutil.which(python) or python),
        gpus=gpus,
        gpu_error=gpu_error,
        devices=Capacity.detect().devices,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_available_memory(),
        runs=str(folder),
        runs_error=writable,
        free_bytes=shutil.disk_usage(folder).free,
        clones=clones,
        shm_bytes=shutil.disk_usage(_SHM).total if _SHM.is_dir() else None,
        limits=_limits(),
        port_error=_port_error(),
        bind_error=_bind_error(),
    )


def _gpus() -> tuple[tuple[str, ...], str | None]:
    """What the driver's own tool lists, and why it does not, where it is there."""
    try:
        done = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except FileNotFoundError:
        return (), None
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi: {error}"
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        return (), f"nvidia-smi: {said[0] if said else f'exit code {done.returncode}'}"
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip()), None


def _nearest(runs: Path) -> Path:
    """The folder of runs, or the one that it would be made in."""
    here = runs.absolute()
    return next(path for path in (here, *here.parents) if path.is_dir())


def _try_folder(folder: Path) -> tuple[str | None, bool]:
    """Why nothing can be written there, and whether files can be cloned."""
    try:
        with (
            tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor.") as one,
            tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor.") as other,
        ):
            one.write(b"x" * 4096)
            one.flush()
            with contextlib.suppress(OSError):
                fcntl.ioctl(other.fileno(), _FICLONE, one.fileno())
                return None, True
            return None, False
    except OSError as error:
        return error.strerror or str(error), False


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _limits() -> dict[str, int | None]:
    names = {"files": "NOFILE", "file size": "FSIZE", "processor time": "CPU"}
    found = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{short}"))[0]
        for name, short in names.items()
    }
    return {name: None if soft == resource.RLIM_INFINITY else soft for name, soft in found.items()}


def _port_error() -> str | None:
    """Why ranks could not meet: they ask for a free port of localhost."""
    try:
        with socket.create_server(("localhost", 0)):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _bind_error() -> str | None:
    """Why a launch would see its sources writable, in the words of the system."""
    with tempfile.TemporaryDirectory(prefix="ckptdrill-doctor-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _BIND, folder],
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    said = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (said[-1] if said else "it cannot be tried here")


# --------------------------------------------------------------------------------------------------
# What it means


def findings(machine: Machine) -> tuple[Finding, ...]:
    """Every finding, in the order in which a run would meet them."""
    return (
        _platform(machine),
        *_interpreter(machine),
        _gpu(machine),
        _cores(machine),
        _memory(machine),
        _disk(machine),
        _copies(machine),
        _isolation(machine),
        _shared_memory(machine),
        _ports(machine),
        *_process_limits(machine),
    )


def _ok(name: str, found: str) -> Finding:
    return Finding(name, Standing.OK, found)


def _warning(name: str, found: str, next_move: str) -> Finding:
    return Finding(name, Standing.WARNING, found, next_move)


def _failing(name: str, found: str, next_move: str) -> Finding:
    return Finding(name, Standing.FAILING, found, next_move)


def _platform(machine: Machine) -> Finding:
    if machine.platform != "linux":
        return _failing("system", machine.platform, "drill on Linux: nothing else is supported")
    return _ok("system", "Linux")


def _interpreter(machine: Machine) -> Iterator[Finding]:
    """The job's python, and its torch."""
    packages, give = machine.packages, "name the job's interpreter: --python PATH"
    if packages is None:
        yield _failing("job python", f"{machine.python} cannot be asked for its packages", give)
        return
    version = packages.get("python", "")
    if _numbers(version) < _LEAST_PYTHON:
        yield _failing("job python", f"{version}, older than 3.9", "use a newer one for the job")
    else:
        yield _ok("job python", f"{version} ({machine.python})")
    torch = packages.get("torch")
    if torch is None:
        yield _failing("job torch", f"{machine.python} has no torch", give)
    elif _numbers(torch) < _LEAST_TORCH:
        yield _failing("job torch", f"{torch}, older than 2.4", "upgrade the job's torch")
    else:
        others = [f"{name} {v}" for name, v in packages.items() if name not in ("python", "torch")]
        yield _ok("job torch", ", ".join([torch, *others]))


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13); nothing where it is no version."""
    parts = version.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(p.isdecimal() for p in parts) else ()


def _gpu(machine: Machine) -> Finding:
    if machine.gpu_error:
        mend = "see that the driver is loaded; a container needs its GPUs passed in"
        return _warning("GPUs", machine.gpu_error, mend)
    if not machine.gpus:
        return _ok("GPUs", "none; ranks share the cores")
    kinds = ", ".join(dict.fromkeys(machine.gpus))
    if not machine.devices:
        mend = "unset CUDA_VISIBLE_DEVICES, or list devices in it"
        return _warning("GPUs", f"{len(machine.gpus)} of {kinds}, none visible to a run", mend)
    return _ok("GPUs", f"{len(machine.devices)} visible: {kinds}")


def _cores(machine: Machine) -> Finding:
    if machine.cores == 1:
        return _warning("cores", "1", "expect launches of several ranks to be slow")
    return _ok("cores", str(machine.cores))


def _memory(machine: Machine) -> Finding:
    if machine.memory_bytes is None:
        return _warning("memory", "the system does not tell", "look yourself: free -g")
    text = f"{machine.memory_bytes / _GIB:.1f} GiB available"
    if machine.memory_bytes < 2 * _GIB:
        return _warning("memory", text, "each rank with torch takes some 0.3 GiB, and its model")
    return _ok("memory", text)


def _disk(machine: Machine) -> Finding:
    mend = "free some space, or name another folder with --runs"
    if machine.runs_error:
        return _failing("runs folder", f"{machine.runs}: {machine.runs_error}", mend)
    free_bytes = machine.free_bytes or 0
    text = f"{free_bytes / _GIB:.1f} GiB free in {machine.runs}"
    if free_bytes < _GIB // 4:
        return _failing("runs folder", text, mend)
    if free_bytes < 10 * _GIB:
        return _warning("runs folder", text, "a run needs room for the checkpoints of its launches")
    return _ok("runs folder", text)


def _copies(machine: Machine) -> Finding:
    if machine.clones:
        return _ok("copies", "files are cloned: a private copy takes no room")
    mend = "put --runs on XFS (reflink=1) or Btrfs, the file system of the checkpoints"
    return _warning("copies", "files are not cloned here: every restore takes a full copy", mend)


def _isolation(machine: Machine) -> Finding:
    if machine.bind_error is None:
        return _ok("isolation", "sources can be mounted read-only for a launch")
    mend = "allow user namespaces (sysctl user.max_user_namespaces, container options)"
    found = f"no read-only mount: {machine.bind_error}; private copies still protect the source"
    return _warning("isolation", found, mend)


def _shared_memory(machine: Machine) -> Finding:
    if machine.shm_bytes is None:
        return _warning("shared memory", "no /dev/shm", "mount a tmpfs there: ranks use it")
    text = f"{machine.shm_bytes / _GIB:.2f} GiB in /dev/shm"
    if machine.shm_bytes < _GIB:
        mend = "give the container more (docker run --shm-size 8g): NCCL and data loaders use it"
        return _warning("shared memory", text, mend)
    return _ok("shared memory", text)


def _ports(machine: Machine) -> Finding:
    if machine.port_error is None:
        return _ok("ports", "localhost gives a free one")
    mend = "see that `localhost` is in /etc/hosts and that ports are left"
    return _failing("ports", f"no free port of localhost: {machine.port_error}", mend)


def _process_limits(machine: Machine) -> Iterator[Finding]:
    files = machine.limits.get("files")
    if files is not None and files < _FILES_NEEDED:
        yield _warning("open files", f"at most {files}", f"ulimit -n {_FILES_NEEDED}")
    else:
        yield _ok("open files", "unlimited" if files is None else f"at most {files}")
    for name, unit, option in (("file size", "bytes", "-f"), ("processor time", "s", "-t")):
        limit = machine.limits.get(name)
        if limit is not None:
            found = f"limited to {limit} {unit}"
            yield _warning(name, found, f"ulimit {option} unlimited, unless it is enough")
        else:
            yield _ok(name, "unlimited")
