"""Start launches on this machine and learn when they have ended.

The runner builds the environment of a job (`job_environment`), describes a launch as a mapping (the
content of `launch.json`) and starts it: `start_cold` executes a cage, which executes torchrun;
`WarmParent.start` has a process that has torch imported fork one. Either way a `Running` comes
back, which is over when `exit.json` exists. A cage that vanished gets one written here, with the
error "cage died", after whatever it left has been killed.

Call everything from one thread that lives as long as the run: the kernel ends a cage when the
thread that started it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ckptdrill.errors import ExitCode, UserError
from ckptdrill.observer import cage

PACK_NAME = "ckptdrill_observer"

# What a job sees of the runner's environment. Anything else reaches it through the matrix only.
PASSED_ON = (
    *("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*"),
    *("PYTORCH_*", "TORCH_*", "HF_*", "TRANSFORMERS_*", "XDG_*", "SSL_CERT_*", "PYTHONPATH"),
)

# Never taken over silently: the environment of a launch is written into the evidence.
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY", re.IGNORECASE)

# What the interpreter, torch or a preloaded module reads once, at import: a warm parent cannot
# take it over from a launch. OMP_NUM_THREADS is set again in every rank, CUDA_VISIBLE_DEVICES is
# read when a rank first uses a GPU.
READ_AT_IMPORT = (
    *("PYTHON*", "LD_*", "LANG", "LANGUAGE", "LC_*", "GLIBC_*", "MALLOC_*", "PATH", "HOME"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "DNNL_*", "ONEDNN_*"),
    *("TORCH*", "PYTORCH_*", "ATEN_*", "CUDA_HOME", "CUDA_PATH", "CUDA_LAUNCH_BLOCKING", "GLOG_*"),
    *("HF_*", "TRANSFORMERS_*", "ACCELERATE_*", "DS_*", "XDG_*", "TRITON_*", "NUMEXPR_*"),
)
_TAKEN_OVER = ("OMP_NUM_THREADS",)

_WRITTEN_BY_A_LAUNCH = (
    "exit.json",
    "cage.*",
    "launcher.*",
    "rank*.jsonl",
    "rank*.out",
    "rank*.err",
    "rank*.stacks",
)
_EARLIER_CAGE_LIMIT_S = 20.0


def job_environment(
    base: Mapping[str, str],
    job_env: Mapping[str, str],
    pack: Path,
    launch_json: Path,
) -> dict[str, str]:
    """The whole environment of a launch: the allowed part of `base`, then `job_env`, then ours.

    `pack` is the folder that holds the package `ckptdrill_observer`; the job's own PYTHONPATH
    follows it. Names that start with CKPTDRILL_ are never taken over. TMPDIR is left to the cage,
    which gives every launch a folder of its own under a path short enough for Unix sockets.
    """
    allowed = {
        name: value
        for name, value in base.items()
        if _matches(name, PASSED_ON) and not _SECRET.search(name)
    }
    environment = {**allowed, **job_env}
    environment = {k: v for k, v in environment.items() if not k.startswith("CKPTDRILL_")}
    environment.setdefault("PATH", os.defpath)
    environment.setdefault("OMP_NUM_THREADS", "1")
    python_path = [str(pack), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
    environment["CKPTDRILL_LAUNCH"] = str(launch_json)
    return environment


def cold_command(launch: Mapping[str, Any]) -> list[str]:
    """The command line that starts `launch` by torchrun, as a person would type it."""
    return cage.torchrun_command(launch)


def import_time_differences(
    warm_env: Mapping[str, str], launch_env: Mapping[str, str]
) -> list[str]:
    """Names of variables that a warm parent with `warm_env` has already read otherwise, sorted.

    Empty: the launch may run warm. Otherwise it has to run cold.
    """
    return sorted(
        name
        for name in {*warm_env, *launch_env}
        if warm_env.get(name) != launch_env.get(name)
        and name not in _TAKEN_OVER
        and _matches(name, READ_AT_IMPORT)
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass
class Running:
    """A launch that was started. `owner` is its cage, or the warm parent that forked its cage."""

    folder: Path
    launch: Mapping[str, Any]
    owner: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    terminating: bool = False

    def poll(self) -> bool:
        """Whether the launch is over, that is, whether `exit.json` exists."""
        if self._exit_json.exists():
            self._release()
            return True
        if self.terminating:
            self._signal_cage()
        if self.owner.poll() is None or _living_cage(self.folder) is not None:
            return False
        # It may have written its last file between the first look and its end.
        if not self._exit_json.exists():
            self._write_exit_of_vanished()
        return True

    def terminate(self) -> None:
        """Have the cage kill everything and write `exit.json`; `poll` tells when it has."""
        self.terminating = True
        self._signal_cage()

    def result(self) -> dict[str, Any]:
        """The content of `exit.json`. Only after `poll` has returned True."""
        content: dict[str, Any] = json.loads(self._exit_json.read_bytes())
        return content

    @property
    def _exit_json(self) -> Path:
        return self.folder / "exit.json"

    def _release(self) -> None:
        if self.launch["launcher"] != "warm":
            self.owner.wait()

    def _signal_cage(self) -> None:
        process = _living_cage(self.folder)
        if process is not None:
            cage.send_signal(process, signal.SIGTERM)

    def _write_exit_of_vanished(self) -> None:
        killed = cage.kill_marked(self.launch["env"]["CKPTDRILL_LAUNCH"])
        cage.remove_scratch(self.folder)
        record = cage.exit_record(self.launch, self.started_s, cage.Ending(error="cage died"))
        known = {"orphans_killed": killed, "cage_pid": 0}
        wall_s = time.monotonic() - self.started
        cage.write_json(self._exit_json, {**record, **known, "wall_s": wall_s})


def _living_cage(folder: Path) -> cage.Process | None:
    try:
        written = json.loads((folder / "cage.pid").read_bytes())
    except FileNotFoundError:
        return None
    process = cage.read_process(written["pid"])
    same = process and process.alive and process.start_ticks == written["start_ticks"]
    return process if same else None


def start_cold(launch: Mapping[str, Any], pack: Path) -> Running:
    """Write `launch.json` and start `launch` in a cage that executes torchrun.

    Raises UserError when the working directory or the interpreter of the job does not exist.
    """
    folder = _prepare(launch, "torchrun")
    script = pack / PACK_NAME / "cage.py"
    # -I and -S: the cage needs the standard library only, whatever the environment says.
    command = [sys.executable, "-I", "-S", str(script)]
    with (folder / "cage.log").open("ab") as log:
        owner = subprocess.Popen(
            [*command, str(folder / "launch.json"), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )
    return Running(folder, {**launch, "launcher": "torchrun"}, owner)


def _prepare(launch: Mapping[str, Any], launcher: str) -> Path:
    folder = Path(launch["folder"])
    if not Path(launch["cwd"]).is_dir():
        raise UserError(
            f"the working directory of the job does not exist: {launch['cwd']}",
            hint="create it, or change `cwd` in the matrix",
        )
    folder.mkdir(parents=True, exist_ok=True)
    _clear_earlier_attempt(folder)
    content = {**launch, "launcher": launcher}
    command = launch.get("command") or cold_command(launch)
    cage.write_json(folder / "launch.json", content)
    cage.write_json(folder / "command.json", {"command": command, "cwd": launch["cwd"]})
    return folder


def _clear_earlier_attempt(folder: Path) -> None:
    """End and remove what an interrupted attempt left: two of them in one file read as one."""
    end = time.monotonic() + _EARLIER_CAGE_LIMIT_S
    while (earlier := _living_cage(folder)) is not None:
        cage.send_signal(earlier, signal.SIGTERM if time.monotonic() < end else signal.SIGKILL)
        time.sleep(0.02)
    if (folder / "launch.json").exists():
        cage.kill_marked(str(folder / "launch.json"))
        cage.remove_scratch(folder)
    for pattern in _WRITTEN_BY_A_LAUNCH:
        for path in folder.glob(pattern):
            path.unlink()


class WarmParent:
    """A process of the job's interpreter that has torch imported and forks launches.

    It starts importing at once; `ready` says whether it came to be. It serves launches whose
    environment agrees with `env` in what is read at import: ask `differences` first.
    """

    def __init__(self, python: str, pack: Path, control_dir: Path, env: Mapping[str, str]) -> None:
        self.control_dir = control_dir
        self.env = dict(env)
        control_dir.mkdir(parents=True, exist_ok=True)
        (control_dir / "ready.json").unlink(missing_ok=True)
        with (control_dir / "parent.log").open("ab") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"{PACK_NAME}.warm", str(control_dir), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**self.env, "PYTHONPATH": self.env.get("PYTHONPATH") or str(pack)},
                cwd=control_dir,
                start_new_session=True,
            )

    def ready(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the imports; False when it cannot serve (see `refusal`)."""
        end = time.monotonic() + timeout_s
        while not self._answer() and self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.refusal() is None

    def refusal(self) -> str | None:
        """Why it cannot serve launches now, in words for the report; None when it can."""
        answer = self._answer()
        if answer.get("error"):
            return str(answer["error"])
        if self._process.poll() is not None:
            return f"the warm parent has died, see {self.control_dir / 'parent.log'}"
        return None if answer else "the warm parent is still importing"

    def _answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads((self.control_dir / "ready.json").read_bytes())
        except FileNotFoundError:
            return {}
        return answer

    def differences(self, launch: Mapping[str, Any]) -> list[str]:
        """Variables for which `launch` has to run cold; empty when this parent can serve it."""
        return import_time_differences(self.env, launch["env"])

    def start(self, launch: Mapping[str, Any]) -> Running:
        """Write `launch.json` and have `launch` forked.

        Raises UserError when the parent cannot serve, or the job's working directory is missing.
        """
        folder = _prepare(launch, "warm")
        request = json.dumps({"launch": str(folder / "launch.json")}) + "\n"
        stream = self._process.stdin
        try:
            if stream is None or self._process.poll() is not None or self._answer().get("error"):
                raise BrokenPipeError
            stream.write(request.encode())
            stream.flush()
        except (BrokenPipeError, ValueError) as error:
            raise UserError(
                f"the launch cannot run warm: {self.refusal()}",
                where=str(self.control_dir),
                hint="run with `--launcher torchrun`",
                code=ExitCode.INTERNAL,
            ) from error
        return Running(folder, {**launch, "launcher": "warm"}, self._process)

    def close(self) -> None:
        """End the parent and every launch it still runs; returns when they have ended."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            # Its cages get SIGTERM from the kernel then, and clean up by themselves.
            self._process.kill()
            self._process.wait()
