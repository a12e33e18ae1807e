"""A warm launch is a cold one without the imports: same environment, same agent, same endings.

One parent serves all tests, which is also what it does in a run.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.errors import UserError
from ckptdrill.launch.local import WarmParent, job_environment, start_cold
from ckptdrill.observer import cage

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print(value.item(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
dist.destroy_process_group()
"""

# Everything a script can see of how it was started, apart from process ids and ports.
SURROUNDINGS = """
import os, random, signal, sys, threading, torch
skipped = {"TMPDIR", "MASTER_PORT", "CKPTDRILL_CAGE_PID", "TORCHELASTIC_ERROR_FILE"}
print({
    "environment": {k: v for k, v in sorted(os.environ.items()) if k not in skipped},
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "stdin": sys.stdin.read(),
    "write_through": [sys.stdout.write_through, sys.stderr.write_through],
    "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.getfilesystemencoding()],
    "leader": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "signals": [str(signal.getsignal(n)) for n in (2, 13, 15, 17)],
    "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:-1],
})
"""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, pack: Path) -> Iterator[WarmParent]:
    control = tmp_path_factory.mktemp("control")
    (control / "preload.json").write_text('["numpy", "no_such_module"]')
    environment = job_environment(os.environ, {}, pack, control / "none.json")
    parent = WarmParent(sys.executable, pack, control, environment)
    assert parent.ready(timeout_s=120.0), parent.refusal()
    yield parent
    parent.close()
    assert parent.refusal() is not None


def test_the_parent_says_what_it_could_not_import(parent: WarmParent) -> None:
    ready = json.loads((parent.control_dir / "ready.json").read_bytes())
    assert ready["not_imported"] == ["no_such_module"]
    assert ready["error"] is None


def test_an_all_reduce_of_two_ranks_gives_what_it_gives_cold(bench: Any, parent: Any) -> None:
    launch = bench.describe(ALL_REDUCE, world_size=2)
    assert parent.differences(launch) == []
    ended = bench.finish(parent.start(launch))
    assert (ended["returncode"], ended["error"], ended["launcher"]) == (0, None, "warm")
    assert ended["orphans_killed"] == 0
    assert bench.read("rank0.out") == "3.0 0 0 2\n"
    assert bench.read("rank1.out") == "3.0 1 1 2\n"
    assert not (bench.folder / "scratch").exists()


def test_two_launches_run_side_by_side(bench: Any, parent: Any, tmp_path: Path) -> None:
    program = ALL_REDUCE + "import time; time.sleep(1.5)"
    other = type(bench)(tmp_path / "other", bench.pack)
    first = parent.start(bench.describe(program, world_size=2))
    second = parent.start(other.describe(program, world_size=2))
    one, two = bench.finish(first), bench.finish(second)
    assert (one["returncode"], two["returncode"]) == (0, 0)
    assert max(one["started_s"], two["started_s"]) < min(one["ended_s"], two["ended_s"]) - 1.0
    assert other.read("rank1.out") == "3.0 1 1 2\n"


def test_a_rank_sees_the_same_surroundings_warm_and_cold(bench: Any, parent: Any) -> None:
    began = time.monotonic()
    keys = {"world_size": 2, "args": ["--lr", "0.1"], "job_env": {"MINE": "1", "TZ": "Asia/Tokyo"}}
    launch = bench.describe(SURROUNDINGS, **keys)
    assert bench.finish(start_cold(launch, bench.pack))["returncode"] == 0
    cold_s = time.monotonic() - began
    cold = [ast.literal_eval(bench.read(f"rank{rank}.out")) for rank in (0, 1)]
    bench.folder.rename(bench.root / "cold")
    began = time.monotonic()
    assert bench.finish(parent.start(bench.describe(SURROUNDINGS, **keys)))["returncode"] == 0
    warm_s = time.monotonic() - began
    warm = [ast.literal_eval(bench.read(f"rank{rank}.out")) for rank in (0, 1)]
    print(f"two ranks: cold {cold_s:.2f} s, warm {warm_s:.2f} s")  # noqa: T201
    for warm_rank, cold_rank in zip(warm, cold, strict=True):
        for aspect in cold_rank:
            assert warm_rank[aspect] == cold_rank[aspect], aspect
    assert warm_s < cold_s


def test_thread_count_is_that_of_the_launch(bench: Any, parent: Any) -> None:
    program = "import torch; print(torch.get_num_threads())"
    bench.finish(parent.start(bench.describe(program, job_env={"OMP_NUM_THREADS": "3"})))
    assert bench.read("rank0.out") == "3\n"


def test_what_is_not_seeded_differs_in_every_rank_of_every_launch(
    bench: Any, parent: Any, tmp_path: Path
) -> None:
    program = "import numpy, random, torch; print(numpy.random.rand(), random.random())\n"
    program += "print(torch.initial_seed(), torch.rand(1).item())"
    other = type(bench)(tmp_path / "other", bench.pack)
    launches = bench.describe(program, world_size=2), other.describe(program, world_size=2)
    for running in [parent.start(launch) for launch in launches]:
        assert bench.finish(running)["returncode"] == 0
    drawn = [b.read(f"rank{rank}.out").split() for b in (bench, other) for rank in (0, 1)]
    assert len({number for numbers in drawn for number in numbers}) == 16


def test_a_crash_is_the_launchs_own(bench: Any, parent: Any, tmp_path: Path) -> None:
    ended = bench.finish(parent.start(bench.describe("raise RuntimeError('on purpose')")))
    assert (ended["returncode"], ended["error"]) == (1, None)
    assert "RuntimeError: on purpose" in bench.read("rank0.err")
    assert "ChildFailedError" in bench.read("launcher.err")
    killed = type(bench)(tmp_path / "killed", bench.pack)
    ended = bench.finish(parent.start(killed.describe("import os; os.kill(os.getpid(), 11)")))
    assert (ended["returncode"], ended["error"]) == (1, None)
    assert "Signal 11" in killed.read("launcher.err")
    after = type(bench)(tmp_path / "after", bench.pack)
    assert bench.finish(parent.start(after.describe("print(1)")))["returncode"] == 0


def test_one_failing_rank_ends_the_other(bench: Any, parent: Any) -> None:
    program = "import os, sys, time; sys.exit(5) if os.environ['RANK'] == '1' else time.sleep(1000)"
    ended = bench.finish(parent.start(bench.describe(program, world_size=2)))
    assert ended["returncode"] == 1
    assert ended["wall_s"] < 10.0
    assert "exitcode  : 5" in bench.read("launcher.err")


def test_a_hang_leaves_stacks_and_no_process(bench: Any, parent: Any) -> None:
    program = "import time\ndef hang_here(): time.sleep(1000)\nhang_here()"
    running = parent.start(bench.describe(program, world_size=2, timeout_s=3.0))
    ended = bench.finish(running)
    assert (ended["timed_out"], ended["stacks_dumped"]) == (True, True)
    assert "hang_here" in bench.read("rank0.stacks")
    assert "hang_here" in bench.read("rank1.stacks")
    bench.until(lambda: not cage.descendants(running.owner.pid), timeout_s=5.0)


def test_terminate_reaches_a_warm_launch(bench: Any, parent: Any) -> None:
    running = parent.start(bench.describe("import time; time.sleep(1000)"))
    running.terminate()
    ended = bench.finish(running)
    assert ended["error"] == "terminated"
    bench.until(lambda: not cage.descendants(running.owner.pid), timeout_s=5.0)


def test_a_killed_cage_leaves_nothing_and_the_parent_serves_on(
    bench: Any, parent: Any, tmp_path: Path
) -> None:
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("daemon.pid", "w").write(f"{os.getpid()}.")
        time.sleep(1000)
    os._exit(0)
time.sleep(1000)
"""
    running = parent.start(bench.describe(program, world_size=2))
    daemon_pid_file = bench.folder / "daemon.pid"
    bench.until(lambda: daemon_pid_file.exists() and daemon_pid_file.read_text().endswith("."))
    os.kill(json.loads(bench.read("cage.pid"))["pid"], signal.SIGKILL)
    assert bench.finish(running)["error"] == "cage died"
    bench.until(lambda: not cage.descendants(running.owner.pid), timeout_s=5.0)
    assert cage.read_process(int(bench.read("daemon.pid").rstrip("."))) is None
    after = type(bench)(tmp_path / "after", bench.pack)
    assert bench.finish(parent.start(after.describe("print(1)")))["returncode"] == 0


@pytest.mark.parametrize("end", ["runner", "parent"])
def test_nothing_survives_a_killed_runner_or_parent(bench: Any, end: str) -> None:
    launch = bench.describe("import time; time.sleep(1000)", world_size=2)
    program = (
        "import json, os, sys, time; from pathlib import Path; "
        "from ckptdrill.launch.local import WarmParent; launch = json.loads(sys.argv[1]); "
        "parent = WarmParent(sys.executable, Path(sys.argv[2]), Path(sys.argv[3]), launch['env']);"
        "parent.ready(120); parent.start(launch); time.sleep(1000)"
    )
    words = [json.dumps(launch), str(bench.pack), str(bench.root / "control")]
    runner = subprocess.Popen([sys.executable, "-c", program, *words], cwd=ROOT)
    ranks = [bench.folder / "rank0.jsonl", bench.folder / "rank1.jsonl"]
    bench.until(lambda: all(path.exists() for path in ranks))
    assert len(bench.alive()) == 6  # runner, parent, cage, agent, two ranks
    warm_pid = json.loads((bench.root / "control/ready.json").read_bytes())["pid"]
    os.kill(runner.pid if end == "runner" else warm_pid, signal.SIGKILL)
    bench.until(lambda: len(bench.alive()) <= (end == "parent"), timeout_s=5.0)
    assert json.loads(bench.read("exit.json"))["error"] == "terminated"
    runner.kill()
    runner.wait()


def test_a_parent_with_threads_refuses(bench: Any) -> None:
    (bench.root / "threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    )
    launch = bench.describe("", job_env={"PYTHONPATH": str(bench.root)})
    control = bench.root / "control"
    control.mkdir()
    (control / "preload.json").write_text('["threads"]')
    parent = WarmParent(sys.executable, bench.pack, control, launch["env"])
    assert not parent.ready(timeout_s=120.0)
    assert parent.refusal() == (
        "the imported modules started 1 threads, which do not survive a fork"
    )
    bench.until(lambda: not bench.alive())
    with pytest.raises(UserError, match="started 1 threads"):
        parent.start(launch)
    parent.close()
