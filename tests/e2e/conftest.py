"""What the end-to-end tests share: ckptdrill started as a person starts it, and what it left
behind.

Everything goes through the installed command line in real processes. Runs are expensive, so the
ones that several tests look at are made once per session.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = Path(sys.executable).with_name("ckptdrill")
GRACE_S = 3.0  # what a killed ckptdrill is given until nothing of it may be alive any more


@dataclass(frozen=True)
class Result:
    """One ended ckptdrill process; `root` is the newest run of the matrix, if it made one."""

    code: int
    out: str
    err: str
    root: Path | None
    seconds: float = 0.0

    @property
    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Cell id -> the content of its verdict.json."""
        assert self.root is not None, self.err
        files = sorted(self.root.glob("cells/*/verdict.json"))
        return {path.parent.name: json.loads(path.read_bytes()) for path in files}

    @property
    def judged(self) -> dict[str, tuple[str, str, str | None, str | None]]:
        """Cell id -> word, reason, blamed item and blamed subject."""
        keys = ("word", "reason", "blame_item", "blame_subject")
        return {cell: tuple(v[key] for key in keys) for cell, v in self.verdicts.items()}

    @property
    def about(self) -> dict[str, Any]:
        """The content of run.json."""
        assert self.root is not None, self.err
        content: dict[str, Any] = json.loads((self.root / "run.json").read_bytes())
        return content

    def check(self, cell: str, item: str) -> dict[str, Any]:
        """One row of the state inventory of a cell."""
        return next(row for row in self.verdicts[cell]["checks"] if row["item"] == item)

    def launch(self, launch_id: str) -> Path:
        """The folder of a launch."""
        assert self.root is not None, self.err
        return self.root / "launches" / launch_id


@dataclass
class Bench:
    """A folder outside the checkout in which a person works: scripts, matrices, runs."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def matrix(self, name: str, text: str) -> Path:
        """Write a matrix file."""
        path = self.folder / f"{name}.yaml"
        path.write_text(f"version: 1\nname: {name}\n{text}")
        return path

    def ckptdrill(self, *arguments: str | Path, timeout_s: float = 300.0) -> Result:
        """Run ckptdrill to its end. It must never show a traceback, whatever happens."""
        began = time.monotonic()
        done = subprocess.run(
            [COMMAND, *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        names = {Path(argument).stem for argument in arguments}
        root = next((root for name in sorted(names) if (root := self.newest(name))), None)
        seconds = time.monotonic() - began
        return Result(done.returncode, done.stdout, done.stderr, root, seconds)

    def newest(self, matrix_name: str) -> Path | None:
        """The newest run folder of a matrix."""
        latest = self.runs / matrix_name / "latest"
        return latest.resolve() if latest.exists() else None

    def drill(self, matrix: Path, *options: str, launcher: str = "warm") -> Result:
        """`ckptdrill run` into this bench's own runs folder."""
        return self.ckptdrill("run", matrix, "--runs", self.runs, "--launcher", launcher, *options)

    def start(self, matrix: Path, *options: str) -> subprocess.Popen[str]:
        """Start `ckptdrill run` and come back at once."""
        command = [COMMAND, "run", matrix, "--runs", self.runs, "--launcher", "warm", *options]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], name: str, timeout_s: float = 300.0) -> Result:
        """Wait for a started run of the matrix `name`."""
        out, err = process.communicate(timeout=timeout_s)
        assert "Traceback" not in err, err
        return Result(process.returncode, out, err, self.newest(name))

    def alive(self) -> list[str]:
        """Living processes that name this folder in their command line or environment."""
        needle = os.fsencode(self.folder) + b"/"
        return [line for line in map(_described, _processes()) if needle in line.encode()]

    def nothing_stays(self) -> None:
        """Fail if anything is alive after the grace period."""
        end = time.monotonic() + GRACE_S
        while self.alive() and time.monotonic() < end:
            time.sleep(0.05)
        assert not self.alive()


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def _described(process: Path) -> str:
    """Pid, command line and environment of a process; empty when it is gone or not alive."""
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        text = (process / "cmdline").read_bytes() + b" " + (process / "environ").read_bytes()
    except OSError:
        return ""
    alive = state not in "ZX"
    return f"{process.name} {text.replace(bytes(1), b' ').decode(errors='replace')}" * alive


def tree_hashes(folder: Path) -> dict[str, str]:
    """Path below `folder` -> SHA-256, of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture(scope="session")
def hashes() -> Callable[[Path], dict[str, str]]:
    """The SHA-256 of every file below a folder."""
    return tree_hashes


@pytest.fixture(scope="session")
def new_bench() -> type[Bench]:
    """`new_bench(folder)`, for runs that several tests share."""
    return Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An empty folder; nothing that ran in it may outlive the test."""
    bench = Bench(tmp_path)
    yield bench
    for process in bench.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
    bench.nothing_stays()


@pytest.fixture(scope="session")
def user_bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A folder with the script of a stranger and nothing else of this project."""
    folder = tmp_path_factory.mktemp("stranger")
    shutil.copy(HERE / "user_script" / "train.py", folder)
    return Bench(folder)


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The shipped quickstart, once, exactly as `make drill` runs it."""
    bench = Bench(tmp_path_factory.mktemp("quickstart"))
    return bench.drill(ROOT / "matrices" / "quickstart.yaml", launcher="auto")
