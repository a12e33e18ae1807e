"""The end of a launch: how the ranks of a job leave together, through files and no collective.

A rank that comes around after the last wanted step has arrived, and so has one whose program has
ended; it waits until all have. But a rank may never come around: it waits in `recv`, or in a
barrier, for a peer that we hold. So once a rank has made its last step, a thread looks at it, from
outside and never before. When another rank has arrived, the last step and its saves are done, and
the rank has stood at the very same place for a while, that place is told, and it has arrived, too.
If it goes on after all, it has not arrived yet, and is looked at again.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .watch import Watch

_LOOK_EVERY_S = 0.1
_AGREE_EVERY_S = 0.005
# How long a rank stands still: in a call that waits for peers, and in any other.
_WAITS_FOR_A_PEER_S = 1.5
_STANDS_ANYWHERE_S = 10.0
_WAITING_MODULES = ("torch.distributed", "deepspeed.comm", "mpi4py")
_SAVING_CALLS = ("save", "_save", "async_save", "dump", "write", "upload", "publish")
_WAITING_CALLS = frozenset({"wait", "barrier", "recv", "send"})


@dataclass(frozen=True)
class Place:
    """Where a thread stands: all its frames, and the innermost in words."""

    frames: tuple[tuple[int, int], ...]
    function: str
    module: str
    waits: bool  # in a call that waits for peers
    saves: bool


def last_step(launch: dict[str, Any]) -> int | None:
    """The step after which a launch is over, whatever happens then. None for one without a last
    step, and for one that is interrupted or watched file by file: it ends where it is told to.
    """
    if launch.get("fault") or launch.get("file_events"):
        return None
    step: int | None = launch.get("stop_step")
    return step


def agree(folder: str, rank: int, world_size: int, timeout_s: float) -> bool:
    """This rank has arrived; wait for the others. False when they did not come in time."""
    arrive(folder, rank)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if _all_have_arrived(folder, world_size):
            return True
        time.sleep(_AGREE_EVERY_S)
    return False


def arrive(folder: str, rank: int) -> None:
    """This rank has come to its end: the others need not wait for it any more."""
    os.makedirs(folder, exist_ok=True)
    with open(_file(folder, rank), "wb"):
        pass


def look_on(watch: Watch) -> None:
    """Start to look at the calling thread, which has made the last wanted step."""
    stepping = threading.get_ident()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    look = watch.recorder.guarded(_look)
    name = "ckptdrill-parting"
    threading.Thread(target=look, args=(watch, stepping, device), name=name, daemon=True).start()


def _look(watch: Watch, stepping: int, device: int | None) -> None:
    folder, rank = watch.agree_folder, watch.recorder.rank
    while not watch.leaving:
        place = _standing(watch, stepping)
        if place is None:
            return
        with _on_a_stream_of_its_own(device):
            watch.sample_last()
        arrive(folder, rank)
        if _agreed_standing(watch, stepping, place):
            watch.leave_standing({"function": place.function, "module": place.module})
        with contextlib.suppress(FileNotFoundError):
            os.remove(_file(folder, rank))


def _standing(watch: Watch, stepping: int) -> Place | None:
    """Wait until the thread stands where it waits for others; None when it has come around."""
    anywhere_s = min(_STANDS_ANYWHERE_S, watch.agree_timeout_s / 2)
    place, since = None, time.monotonic()
    while not watch.leaving:
        now = place_of(stepping)
        if now is None:
            return None
        if place is None or now.frames != place.frames or now.saves or not watch.is_at_rest():
            place, since = now, time.monotonic()
        stood_s = time.monotonic() - since
        long_enough = stood_s > (_WAITS_FOR_A_PEER_S if now.waits else anywhere_s)
        if long_enough and _another_has_arrived(watch.agree_folder, watch.recorder.rank):
            return now
        time.sleep(_LOOK_EVERY_S)
    return None


def _agreed_standing(watch: Watch, stepping: int, place: Place) -> bool:
    """Whether all have arrived before the thread goes on from `place`."""
    while not watch.leaving:
        now = place_of(stepping)
        if now is None or now.frames != place.frames:
            return False
        if _all_have_arrived(watch.agree_folder, watch.world_size):
            return True
        time.sleep(_AGREE_EVERY_S)
    return False


def place_of(thread: int) -> Place | None:
    """Where a thread stands; None when it is gone."""
    innermost = frame = sys._current_frames().get(thread)
    if innermost is None:
        return None
    frames, saves = [], False
    while frame is not None:
        frames.append((id(frame), frame.f_lasti))
        saves = saves or frame.f_code.co_name.startswith(_SAVING_CALLS)
        frame = frame.f_back
    module = str(innermost.f_globals.get("__name__", ""))
    called = _called(innermost)
    waits = module.startswith(_WAITING_MODULES) or called in _WAITING_CALLS
    own = module.startswith(_WAITING_MODULES) or called is None
    function = innermost.f_code.co_name if own else str(called)
    return Place(tuple(frames), function, module, waits, saves)


def _called(frame: Any) -> str | None:
    """The name that a frame's present call goes by, as far as its code tells."""
    name = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"):
            name = instruction.argval
    return name


@contextlib.contextmanager
def _on_a_stream_of_its_own(device: int | None) -> Iterator[None]:
    """The device's ordinary stream may itself wait for the peer."""
    if device is None:
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def _another_has_arrived(folder: str, rank: int) -> bool:
    return any(name != os.path.basename(_file(folder, rank)) for name in _arrived(folder))


def _all_have_arrived(folder: str, world_size: int) -> bool:
    return len(_arrived(folder)) >= world_size


def _arrived(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank{rank}")
