"""What the tests of the observer share: a small script under the real observer, in seconds.

Torch is imported once per session, by the warm parent that ckptdrill itself uses; every script is a
launch of its own, with agent, ranks and cage. A launch without the observer is a plain interpreter.
"""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.fact_files import read_folder
from ckptdrill.launch.local import WarmParent, job_environment
from ckptdrill.resources import observer_dir

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Observed:
    """What one launch left: its facts in file order per rank, its output, its exit record."""

    folder: Path
    ended: dict[str, Any]

    def facts(self, kind: str | None = None, rank: int = 0) -> list[dict[str, Any]]:
        """The facts of one rank, of one kind or all."""
        record = read_folder(self.folder, "observed", rank + 1)
        lines = []
        for fact in (fact for fact in record.facts if fact.rank == rank):
            line = {"fact": fact.kind, "rank": rank, "step": fact.step, "t": record.t(fact)}
            apart = {"took_s": record.took_s(fact) or None, "path": record.path(fact)}
            line |= {name: told for name, told in apart.items() if told is not None}
            lines.append({**line, **fact.data})
        return [line for line in lines if kind in (None, line["fact"])]

    def column(self, kind: str, key: str, rank: int = 0) -> list[Any]:
        """One key of all facts of a kind; None where a fact lacks it."""
        return [fact.get(key) for fact in self.facts(kind, rank)]

    def state(self, step: int, at: str = "forward", rank: int = 0) -> dict[str, Any]:
        """The sampled state at one completed step; the last one if there are several."""
        return [f for f in self.facts("state", rank) if (f["step"], f["at"]) == (step, at)][-1]

    def out(self, rank: int = 0) -> str:
        """Standard output of a rank."""
        return (self.folder / f"rank{rank}.out").read_text()

    def err(self, rank: int = 0) -> str:
        """Standard error of a rank."""
        return (self.folder / f"rank{rank}.err").read_text()

    def is_whole(self, ranks: int = 1) -> None:
        """Every rank came to a good end, and the observer itself had no failure."""
        for rank in range(ranks):
            assert not self.facts("observer_failed", rank)
            assert not self.facts("crashed", rank), self.err(rank)
            ends = self.column("exited", "code", rank) or ["stopped"]
            assert ends in ([0], ["stopped"]), self.err(rank)
        assert self.ended["returncode"] == 0


Observe = Callable[..., Observed]


def _script(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture(scope="session")
def _parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmParent]:
    pack = tmp_path_factory.mktemp("pack")
    package = pack / "ckptdrill_observer"
    package.mkdir()
    for module in observer_dir().glob("*.py"):
        shutil.copy(module, package)
    env = job_environment(os.environ, {}, pack, pack / "launch.json")
    env = {name: value for name, value in env.items() if name not in ("CKPTDRILL_LAUNCH", "TMPDIR")}
    parent = WarmParent(sys.executable, pack, pack / "control", env)
    assert parent.ready(TIMEOUT_S), parent.refusal()
    yield parent
    parent.close()


@pytest.fixture
def observe(_parent: WarmParent, tmp_path: Path) -> Observe:
    """Run the text of a script under the observer: `observe(text, *args, ranks=1, …)`.

    Other keywords are keys of launch.json, such as `stop_step` and `sample_steps`.
    """

    def run(text: str, *args: str, ranks: int = 1, name: str = "launch", **keys: Any) -> Observed:
        folder = tmp_path / name
        launch_json = folder / "launch.json"
        pack = _parent.control_dir.parent
        launch = {
            "id": name,
            "folder": str(folder),
            "program": str(_script(tmp_path, text)),
            "module": None,
            "args": list(args),
            "cwd": str(tmp_path),
            "python": sys.executable,
            "world_size": ranks,
            "env": job_environment(os.environ, {}, pack, launch_json),
            "stop_step": None,
            "sample_steps": [],
            "timeout_s": TIMEOUT_S,
            "agree_timeout_s": 60.0,
            **keys,
        }
        folder.mkdir(parents=True)
        running = _parent.start(launch)
        end = time.monotonic() + 2 * TIMEOUT_S
        while not running.poll():
            assert time.monotonic() < end
            time.sleep(0.01)
        return Observed(folder, running.result())

    return run


@pytest.fixture
def unobserved(tmp_path: Path) -> Callable[..., None]:
    """Run the text of a script by a plain interpreter, or by torchrun on several ranks."""

    def run(text: str, *args: str, ranks: int = 1) -> None:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        done = subprocess.run(
            [sys.executable, *(torchrun if ranks > 1 else []), _script(tmp_path, text), *args],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return run
