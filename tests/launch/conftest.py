"""What the tests of launchers share: a pack with a small stand-in for the observer, the description
of a launch, and the search of /proc for whatever a launch may have left alive.

The stand-in does what the cage relies on (output to the rank's files, the `started` fact, the stack
dump, death with the agent) and nothing else, so these tests hold whatever the observer does.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.launch.local import Running, job_environment, start_cold
from ckptdrill.resources import observer_dir

OBSERVER = """
import faulthandler, json, os, runpy, signal, sys
from .cage import STACKS_SIGNAL, die_with_parent

def main(argv):
    die_with_parent(signal.SIGKILL)
    with open(os.environ["CKPTDRILL_LAUNCH"]) as stream:
        folder = json.load(stream)["folder"]
    rank = os.environ["RANK"]
    for descriptor, ending in ((1, "out"), (2, "err")):
        target = os.open(f"{folder}/rank{rank}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, descriptor)
    faulthandler.register(STACKS_SIGNAL, file=open(f"{folder}/rank{rank}.stacks", "w"))
    def fact(kind, **data):
        with open(f"{folder}/rank{rank}.jsonl", "a") as stream:
            stream.write(json.dumps({"fact": kind, **data}) + "\\n")
    fact("started", pid=os.getpid())
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    fact("exited", code=0)
    sys.stdout.flush()
    os._exit(0)

if __name__ == "__main__":
    main(sys.argv[1:])
"""


class Bench:
    """One launch folder under `root`, and the pack that its ranks run."""

    def __init__(self, root: Path, pack: Path) -> None:
        self.root = root
        self.pack = pack
        self.folder = root / "launch"

    def describe(self, program: str, **keys: Any) -> dict[str, Any]:
        """The content of launch.json for `program`, the text of a script."""
        self.folder.mkdir(parents=True)
        script = self.folder / "program.py"
        script.write_text(program)
        launch_json = self.folder / "launch.json"
        job_env = keys.pop("job_env", {})
        return {
            "id": self.folder.name,
            "folder": str(self.folder),
            "program": str(script),
            "module": None,
            "args": [],
            "cwd": str(self.folder),
            "python": sys.executable,
            "world_size": 1,
            "env": job_environment(os.environ, job_env, self.pack, launch_json),
            "timeout_s": 60.0,
            "launcher": "torchrun",
            **keys,
        }

    def start(self, program: str, **keys: Any) -> Running:
        """Start `program` in a cage, by a bare interpreter in place of torchrun."""
        command = [sys.executable, "-S", str(self.folder / "program.py")]
        return start_cold(self.describe(program, **{"command": command, **keys}), self.pack)

    def run(self, program: str, **keys: Any) -> dict[str, Any]:
        """Start `program` and wait for what exit.json says."""
        return self.finish(self.start(program, **keys))

    def finish(self, running: Running) -> dict[str, Any]:
        """Wait for what exit.json says."""
        self.until(running.poll)
        return running.result()

    def until(self, condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
        """The first true value of `condition`, asked every few milliseconds."""
        end = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.005)
        return value

    def read(self, name: str) -> str:
        """The text of a file of the launch."""
        return (self.folder / name).read_text()

    def alive(self) -> list[str]:
        """The command lines of all living processes that name a path below `root`."""
        lines = [_command_line(path) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [line for line in lines if f"{self.root}/" in line]


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (ProcessLookupError, FileNotFoundError):
        return ""


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds the real cage and warm parent, and the stand-in."""
    folder = tmp_path_factory.mktemp("pack")
    package = folder / "ckptdrill_observer"
    package.mkdir()
    for name in ("cage.py", "warm.py"):
        shutil.copy(observer_dir() / name, package / name)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(OBSERVER)
    return folder


@pytest.fixture
def bench(tmp_path: Path, pack: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, pack)
    yield bench
    assert not bench.alive()
    links = [link.readlink() for link in Path("/tmp").glob("ckptdrill-*/t")]
    assert not [target for target in links if target.is_relative_to(tmp_path)]
    assert not (bench.folder / "scratch").exists()
