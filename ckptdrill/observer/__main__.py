"""Start of every rank: `python -m ckptdrill_observer PROGRAM args…` (or `-m MODULE args…`).

Order: read launch.json, send the output of this rank to its own files, arm the stack dump, record
`started`, install the hooks, run the program, record how it ended. A program that ends by itself
gets
its exit handlers and threads as usual; only then does the process leave, without the teardown in
which a finished rank may hang.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import hashlib
import json
import os
import platform
import signal
import sys
import threading
import traceback
from typing import Any

from .cage import die_with_parent
from .facts import Recorder, chain, leave
from .packages import imported


def main(arguments: list[str]) -> None:
    """Run one rank. Never returns."""
    with open(os.environ["CKPTDRILL_LAUNCH"], encoding="utf-8") as stream:
        launch = json.load(stream)
    rank = int(os.environ.get("RANK", "0"))
    die_with_parent(signal.SIGKILL)
    # A warm parent may have asked for the name of the host before this launch got one of its own.
    platform._uname_cache = None  # type: ignore[attr-defined]
    _redirect(launch["folder"], rank)
    _arm_stacks(launch["folder"], rank)
    recorder = Recorder(os.path.join(launch["folder"], f"rank{rank}.jsonl"), rank)
    _run(recorder, launch, arguments)


def _run(recorder: Recorder, launch: dict[str, Any], arguments: list[str]) -> None:
    loop = None
    code = 0
    try:
        from . import (  # torch is imported here, with the output in place
            hooks,
            kept,
            probe,
            program,
            quiet,
            storage,
            watch,
        )

        recorder.record_durably("started", **_describe(launch))
        loop = watch.Watch(recorder, launch)
        recorder.guarded(storage.install)(recorder, launch)
        hooks.install(loop, recorder)
        if launch.get("quiet"):
            recorder.guarded(quiet.install)(hooks.in_a_model)
        if launch.get("keep"):
            look = recorder.guarded(kept.Keeper(loop, launch).look)
            loop.came_around.append(look)
            loop.ended.append(look)
        if launch.get("file_events"):
            from . import file_events

            recorder.guarded(file_events.install)(loop, recorder, launch)
        probe.attach(recorder)
        gc.freeze()  # what the imports made holds no model: looking for one becomes quick
        program.run(arguments)
        _finish_threads()
    except SystemExit as request:
        _finish_threads()
        code = _exit_code(request)
    except BaseException as error:
        if loop is not None:
            loop.let_part()
        recorder.record_durably(
            "crashed",
            during=loop.phase if loop else "start",
            error=chain(error),
            traceback=traceback.format_exc()[-8000:],
        )
        traceback.print_exc()
        code = 1
    if loop is not None:
        recorder.guarded(loop.program_ended)(well=code == 0)
    recorder.guarded(lambda: recorder.record("imported", packages=imported()))()
    if loop is not None:
        storage.conclude(recorder, launch)
    recorder.record_durably("exited", code=code)
    leave(code)


def _redirect(folder: str, rank: int) -> None:
    """Output of any size goes to this rank's files; nobody holds it in memory."""
    for descriptor, ending in ((1, "out"), (2, "err")):
        path = os.path.join(folder, f"rank{rank}.{ending}")
        target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(target, descriptor)
        os.close(target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _arm_stacks(folder: str, rank: int) -> None:
    """On the cage's signal every thread's stack is written, even while C code holds the GIL."""
    stacks = open(os.path.join(folder, f"rank{rank}.stacks"), "w")  # noqa: SIM115 - kept open
    faulthandler.register(signal.SIGRTMIN + 1, file=stacks, all_threads=True)


def _describe(launch: dict[str, Any]) -> dict[str, Any]:
    import torch

    from . import fingerprint, parting

    cuda = torch.cuda.is_available()
    return {
        "pid": os.getpid(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "host": os.uname().nodename,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(0) if cuda else platform.machine(),
        "device_count": torch.cuda.device_count() if cuda else 0,
        "threads": torch.get_num_threads(),
        "arguments": launch["args"],
        "last_step": parting.last_step(launch),
        "program_sha256": _sha256(launch.get("program")),
        "self_test": fingerprint.self_test(),
    }


def _sha256(path: str | None) -> str | None:
    if path is None:
        return None
    with open(path, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def _finish_threads() -> None:
    """What the interpreter does at its end: wait for threads, run the exit handlers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code
    sys.stderr.write(f"{request.code}\n")
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
