"""Feeds mutated checkpoints of every format to what reads checkpoints, and watches it.

    python tests/fuzz/fuzz_formats.py --cases 10000 --seed 1 --workers 2

First one small checkpoint per format is written (needs torch). Then each worker, a process without
torch that is held to 512 MiB, mutates private copies and runs every operation on them. Anything
but a result or a `UserError` is a failure: another exception, 2 s of processor time, a process
started, a file written, a file outside the case opened, a new module imported, the file that a
hostile pickle would create. Prints one line per failure and a closing line; exit code 1 if there is
any. A case is made again alone by `--only NUMBER`.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from ckptdrill import diffing, formats, inspecting  # noqa: E402 - after the path is set
from ckptdrill.errors import UserError  # noqa: E402 - same
from ckptdrill.formats import compare, stacks  # noqa: E402 - same
from ckptdrill.formats.classify import classify  # noqa: E402 - same
from ckptdrill.formats.stacks import Checkpoint  # noqa: E402 - same
from tests.fuzz import mutate  # noqa: E402 - same

MEMORY_BYTES = 512 << 20
CPU_S = 2.0
WALL_S = 30.0
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_FORBIDDEN = ("subprocess.", "os.", "socket.", "shutil.", "exec", "ctypes.", "pty.", "import")
_HARMLESS = frozenset({"os.listdir", "os.scandir", "os.walk", "os.fwalk"})


@dataclass
class Case:
    """A mutated checkpoint and the sound one it was made from; `read` once an operation has."""

    path: Path
    pristine: Checkpoint
    read: Checkpoint | None = None


def _inspect(case: Case) -> None:
    """As `ckptdrill inspect` does, both outputs."""
    case.read = stacks.read(case.path)
    said = classify(case.read)
    json.dumps(inspecting.document(case.read, said))
    "\n".join(inspecting.page(case.read, said)).encode("utf-8", "strict")


def _diff(case: Case) -> None:
    """As `ckptdrill diff` does, both outputs; of what could be read."""
    if case.read is not None:
        a, b = case.pristine, case.read
        rows, values = list(compare.tensors(a, b, 1e-3)), diffing.differing(a, b)
        json.dumps(diffing.document(a, b, rows, values))
        "\n".join(diffing.page(a, b, rows, values)).encode("utf-8", "strict")


def _damage_reads(case: Case) -> None:
    """As a damage drill does: every file, every tensor, where the bytes of each first chunk are."""
    formats.files(case.path)
    for tensor in formats.tensors(case.path).values():
        for chunk in tensor.chunks[:1]:
            formats.payload(case.path, chunk)


# To fuzz another reader of checkpoint files, add it here; `ONE_IN` for those that repeat much of
# what another one does.
OPERATIONS: tuple[Callable[[Case], None], ...] = (_inspect, _diff, _damage_reads)
ONE_IN: dict[Callable[[Case], None], int] = {_damage_reads: 4}


# --------------------------------------------------------------------------------------------------
# Watching


class Watch:
    """Sees what the operations do, through the audit hook of the interpreter."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.allowed = allowed
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            self._opened(*arguments)
        elif event.startswith(_FORBIDDEN) and event not in _HARMLESS:
            self.seen.append(f"{event} {str(arguments)[:200]}")

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, int):
            return
        real = os.path.realpath(os.fsdecode(path))
        writes = isinstance(flags, int) and flags & _WRITES
        if writes or not real.startswith(self.allowed):
            self.seen.append(f"open {real} {mode} {flags}")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look on while the body runs, and give it the time that it may take."""
        self.seen, self.active = [], True
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.active = False


class _OutOfTime(BaseException):
    """Not an Exception, so that no reader takes it for a damaged file."""


def _ring(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime(signal.Signals(number).name)


# --------------------------------------------------------------------------------------------------
# One worker


def work(seeds: Path, scratch: Path, numbers: range, seed: int) -> list[dict[str, Any]]:
    """Run the cases `numbers`; what failed, and last how many refusals and results there were."""
    names = sorted(json.loads((seeds / "names.json").read_text()))
    allowed = (f"{scratch.resolve()}{os.sep}", f"{seeds.resolve()}{os.sep}")
    for signal_number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(signal_number, _ring)
    pristine = {name: stacks.read(seeds / name) for name in names}
    for name in names:  # so that no late import is taken for one of a pickle
        _run_all(Case(seeds / name, pristine[name]))
    watch = Watch(allowed)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    failures, counts = [], {"results": 0, "refusals": 0, "slowest_s": 0.0}
    for number in numbers:
        random = Random(f"{seed}-{number}")
        name = random.choice(names)
        path = mutate.fresh_copy(seeds / name, scratch / "case" / Path(name).name)
        done = mutate.mutate(path, random)
        case = Case(path, pristine[name])
        for operation in OPERATIONS:
            if random.randrange(ONE_IN.get(operation, 1)):
                continue
            what = _one(operation, case, watch, counts)
            if what:
                about = f"{number} {name}: {done}: {operation.__name__.strip('_')}"
                failures.append({"case": about, "what": what})
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])
    return [*failures, {**counts, "peak_mib": peak >> 10, "cpu_s": round(time.process_time())}]


def _run_all(case: Case) -> None:
    "é".encode("unicode_escape"), "é".encode("cp437")
    for operation in OPERATIONS:
        with contextlib.suppress(UserError):
            operation(case)


def _one(
    operation: Callable[[Case], None], case: Case, watch: Watch, counts: dict[str, Any]
) -> str | None:
    """Why the operation failed on this case; None when it gave a result or refused."""
    started = time.process_time()
    failure = None
    try:
        with watch.watching():
            operation(case)
        counts["results"] += 1
    except UserError:
        counts["refusals"] += 1
    except _OutOfTime as late:
        failure = f"over {CPU_S} s ({late}): {traceback.format_exc()[-600:]}"
    except BaseException:  # noqa: BLE001 - whatever else it is, it is what is looked for
        failure = traceback.format_exc()[-1500:]
    counts["slowest_s"] = max(counts["slowest_s"], round(time.process_time() - started, 3))
    if failure is None and watch.seen:
        failure = f"it did what no reader may: {watch.seen[:3]}"
    if failure is None and (case.path.parent / mutate.PROOF).exists():
        failure = "a pickle was executed"
    return failure


# --------------------------------------------------------------------------------------------------
# The program


def main() -> int:
    """Write the seeds, start the workers, gather what failed."""
    options = _options()
    if options.seeds:
        numbers = range(options.first, options.last, options.stride)
        print(json.dumps(work(options.seeds, options.scratch, numbers, options.seed)))
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        seeds = Path(folder) / "seeds"
        _write_seeds(seeds)
        reports = list(_reports(options, seeds, Path(folder)))
        if options.keep:
            shutil.copytree(folder, options.keep, symlinks=True)
    failures = [each for report in reports for each in report[:-1]]
    for each in failures[:20]:
        print(f"FAILED {each['case']}\n{each['what']}\n")
    counts = [report[-1] for report in reports]
    print(
        f"{options.cases} cases, seed {options.seed}: {len(failures)} failures; "
        f"{sum(c['results'] for c in counts)} results, {sum(c['refusals'] for c in counts)} "
        f"refusals; slowest {max(c['slowest_s'] for c in counts)} s, at most "
        f"{max(c['peak_mib'] for c in counts)} MiB; {time.monotonic() - started:.0f} s, "
        f"of which {sum(c['cpu_s'] for c in counts)} s of processors"
    )
    return 1 if failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, help="one case, by its number")
    parser.add_argument("--keep", type=Path, help="copy the last case of each worker here")
    for name in ("seeds", "scratch"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    for name in ("first", "last", "stride"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _write_seeds(seeds: Path) -> None:
    from tests.formats import samples  # imports torch, which no worker may

    for name in samples.ALL:
        samples.write(seeds, name, parameters=2)
    (seeds / "names.json").write_text(json.dumps(list(samples.ALL)))


def _reports(
    options: argparse.Namespace, seeds: Path, folder: Path
) -> Iterator[list[dict[str, Any]]]:
    alone = options.only is not None
    first, last = (options.only, options.only + 1) if alone else (0, options.cases)
    workers = 1 if alone else options.workers
    command = [sys.executable, __file__, "--seeds", str(seeds), "--seed", str(options.seed)]
    command += ["--last", str(last), "--stride", str(workers)]
    started = [
        subprocess.Popen(
            [*command, "--first", str(first + worker), "--scratch", str(folder / f"w{worker}")],
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        for worker in range(workers)
    ]
    for process in started:
        said, _ = process.communicate()
        if process.returncode != 0:
            what = f"the worker ended with {process.returncode}"
            yield [
                {"case": "worker", "what": what},
                {"results": 0, "refusals": 0, "slowest_s": 0.0, "peak_mib": 0, "cpu_s": 0},
            ]
        else:
            yield json.loads(said)


if __name__ == "__main__":
    sys.exit(main())
