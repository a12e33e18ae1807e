"""Record what a save does to files, event by event, so that every interruption can be replayed.

Only a launch whose `launch.json` has `file_events` pays for this. In order: an audit hook sees each
folder made, file opened for writing, renamed, cut or removed below the watched folder, *before* it
happens; `os.fsync` is wrapped, because no audit event tells of it, and so are the writers outside
Python (`torch.save` to a path, safetensors), whose opening is announced in their place. With every
event goes the size on disk of each file that is being written, so that what a killed process leaves
behind is known to the byte. What an event is about to destroy is kept aside first.

Events made between the optimizer step that is saved and the next one are numbered from 0, on each
rank by itself: that is how a fault names one. Collectives in between are recorded too: they
tell how far the others can get when one rank is gone. Nothing here adds one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import shutil
import sys
import threading
import time
from typing import Any, Callable

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d as c10d

from . import faults
from .facts import Recorder
from .hooks import before
from .watch import Watch

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
# What each collective waits for: everybody, the rank that has the data, or that receives it.
_COLLECTIVES = {
    "barrier": "all",
    "monitored_barrier": "all",
    "all_reduce": "all",
    "all_gather": "all",
    "all_gather_into_tensor": "all",
    "reduce_scatter": "all",
    "reduce_scatter_tensor": "all",
    "all_to_all": "all",
    "all_to_all_single": "all",
    "broadcast": "from-root",
    "scatter": "from-root",
    "gather": "to-root",
    "reduce": "to-root",
}


class FileEvents:
    """The numbered file events of this rank. `plan` is `file_events` of the launch: `root`, the
    watched folder; `kept`, where what is destroyed goes; `step`, the local step that is saved.
    """

    def __init__(
        self, recorder: Recorder, plan: dict[str, Any], fault: faults.Fault | None
    ) -> None:
        self.root = plan["root"]
        self._recorder = recorder
        self._kept = plan["kept"]
        self._step = plan["step"]
        self._fault = fault
        self._pid = os.getpid()
        self._numbered = self._all = 0
        self._growing: dict[str, int] = {}  # path -> size on disk when last looked at
        self._entered: dict[str, int] = {}  # process group -> collectives entered so far
        self._lock = threading.RLock()
        self._own = threading.local()
        os.makedirs(self._kept, exist_ok=True)

    # ------------------------------------------------------------------------------ what is seen

    def audited(self, name: str, args: tuple[Any, ...]) -> None:
        """One audit event of any kind; those that change no file below the root are passed over."""
        translate = _AUDITED.get(name)
        if translate is None or getattr(self._own, "busy", False) or os.getpid() != self._pid:
            return
        self._own.busy = True
        try:
            for event in translate(*args):
                self._happens(**event)
        except Exception as error:
            self._recorder.failed("file events", error)
        finally:
            self._own.busy = False

    def watches(self, target: Any) -> bool:
        """Whether `target`, a path or an open file, is below the root."""
        path = target if _is_path(target) else getattr(target, "name", None)
        return _is_path(path) and self._below(_absolute(path))

    def announce(self, op: str, path: str | None = None) -> None:
        """An event that no audit hook sees."""
        if os.getpid() != self._pid:
            return
        self._own.busy = True
        try:
            self._happens(op, path, truncates=True)
        except Exception as error:
            self._recorder.failed("file events", error)
        finally:
            self._own.busy = False

    def synced(self, descriptor: Any) -> None:
        """`os.fsync` is about to be called."""
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = _of_descriptor(number)
        if self._below(path):
            self.announce("fsync", path)

    def entered(self, op: str, arguments: dict[str, Any]) -> None:
        """A collective is about to be called by this rank."""
        group = arguments.get("group") or c10d._get_default_group()
        name = str(group.group_name)
        number = self._entered[name] = self._entered.get(name, -1) + 1
        if self._recorder.step != self._step:
            return
        with self._lock:
            self._recorder.record(
                "sync",
                op=op,
                waits=_COLLECTIVES[op],
                group=name,
                number=number,
                root=_root_rank(group, arguments),
                members=c10d.get_process_group_ranks(group),
                sizes=self._sizes(),
                at_ns=time.monotonic_ns(),
            )

    # ------------------------------------------------------------------------------ one event

    def _happens(
        self, op: str, path: str | None = None, target: str | None = None, **more: Any
    ) -> None:
        if path is not None and not (self._below(path) or self._below(target)):
            return
        with self._lock:
            number = self._number()
            if self._fault is not None and self._fault.strikes_at(number):
                event = {"event": number, "op": op, "path": self._relative(path)}
                self._fault.strike(self._recorder, self.root, event)
            self._recorder.record(
                "file_event",
                n=number,
                op=op,
                path=self._relative(path),
                target=self._relative(target),
                sizes=self._sizes(),
                kept=self._keep(op, path, target),
                at_ns=time.monotonic_ns(),
                **more,
            )
            self._follow(op, path, target, bool(more.get("truncates")))

    def _number(self) -> int | None:
        """The number of this event within the save under drill; None outside it."""
        if self._recorder.step != self._step:
            return None
        self._numbered += 1
        return self._numbered - 1

    def _sizes(self) -> dict[str, int]:
        """Bytes on disk of the files that this rank has been writing since the last look."""
        opened = _open_paths()
        changed = {}
        for path, known in list(self._growing.items()):
            try:
                size = os.stat(path).st_size
            except OSError:
                size = known
            if size != known:
                changed[self._relative(path) or ""] = self._growing[path] = size
            if path not in opened:
                del self._growing[path]
        return changed

    def _follow(self, op: str, path: str | None, target: str | None, truncates: bool) -> None:
        if op in ("open", "truncate") and path is not None and self._below(path):
            exists = os.path.exists(path)
            self._growing[path] = 0 if truncates or not exists else os.stat(path).st_size
        elif op == "rename" and target is not None and path in self._growing:
            self._growing[target] = self._growing.pop(path)

    def _keep(self, op: str, path: str | None, target: str | None) -> str | None:
        """Where the file that `op` destroys is kept; None when it destroys none."""
        victim = target if op == "rename" and self._below(target) else path
        if op not in ("open", "truncate", "remove", "rename") or not self._below(victim):
            return None
        if victim is None or not os.path.isfile(victim) or os.path.islink(victim):
            return None
        self._all += 1
        kept = os.path.join(self._kept, f"rank{self._recorder.rank}.{self._all}")
        if op in ("remove", "rename"):
            os.link(victim, kept)  # the file itself goes on living under this name
        else:
            shutil.copyfile(victim, kept)
        return os.path.basename(kept)

    def _below(self, path: str | None) -> bool:
        return path is not None and (path == self.root or path.startswith(self.root + os.sep))

    def _relative(self, path: str | None) -> str | None:
        """`path` below the root; None when it is not."""
        return os.path.relpath(path, self.root) if path is not None and self._below(path) else None


# ------------------------------------------------------------------------------ audit events


def _opened(path: Any, mode: Any, flags: Any) -> list[dict[str, Any]]:
    if not isinstance(flags, int) or not flags & _WRITING or not _is_path(path):
        return []
    found = _absolute(path)
    return [
        {
            "op": "open",
            "path": found,
            "truncates": bool(flags & os.O_TRUNC),
            "exclusive": bool(flags & os.O_EXCL),
            "creates": bool(flags & os.O_CREAT),
        }
    ]


def _moved(source: Any, target: Any, source_at: Any = -1, target_at: Any = -1) -> list[Any]:
    names = {"path": _absolute(source, source_at), "target": _absolute(target, target_at)}
    return [{"op": "rename", **names}]


def _linked(source: Any, target: Any, source_at: Any = -1, target_at: Any = -1) -> list[Any]:
    names = {"path": _absolute(source, source_at), "target": _absolute(target, target_at)}
    return [{"op": "link", **names}]


def _pointed(text: Any, path: Any, folder: Any = -1) -> list[Any]:
    return [{"op": "symlink", "path": _absolute(path, folder), "text": os.fsdecode(text)}]


def _made(path: Any, _mode: Any = 0, folder: Any = -1) -> list[Any]:
    return [{"op": "mkdir", "path": _absolute(path, folder)}]


def _removed(path: Any, folder: Any = -1) -> list[Any]:
    return [{"op": "remove", "path": _absolute(path, folder)}]


def _emptied(path: Any, folder: Any = -1) -> list[Any]:
    return [{"op": "rmdir", "path": _absolute(path, folder)}]


def _cut(path: Any, length: Any) -> list[Any]:
    found = _of_descriptor(path) if isinstance(path, int) else _absolute(path)
    return [{"op": "truncate", "path": found, "length": int(length)}]


_AUDITED: dict[str, Callable[..., list[Any]]] = {
    "open": _opened,
    "os.rename": _moved,
    "os.link": _linked,
    "os.symlink": _pointed,
    "os.mkdir": _made,
    "os.remove": _removed,
    "os.rmdir": _emptied,
    "os.truncate": _cut,
}


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, bytes, os.PathLike))


def _absolute(path: Any, folder: Any = -1) -> str:
    """`path` as the kernel will find it; `folder` is a descriptor, or -1 for the current one."""
    text = os.fsdecode(path)
    base = _of_descriptor(folder) if isinstance(folder, int) and folder >= 0 else None
    return os.path.abspath(os.path.join(base or "", text))


def _of_descriptor(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _open_paths() -> set[str]:
    return {_of_descriptor(int(name)) for name in os.listdir("/proc/self/fd")}


# ------------------------------------------------------------------------------ installation


def install(watch: Watch, recorder: Recorder, launch: dict[str, Any]) -> None:
    """Begin to record, and arm the fault of this rank if the launch carries one.

    After `hooks.install`: the calls that are wrapped there are wrapped once more here.
    """
    fault = faults.planned(launch, recorder.rank)
    events = FileEvents(recorder, launch["file_events"], fault)
    sys.addaudithook(events.audited)
    for name in ("fsync", "fdatasync"):
        before(os, name, recorder.guarded(events.synced))
    _watch_saves(events)
    for name in _COLLECTIVES:
        _watch_collective(events, recorder, name)

    def came_around() -> None:
        if recorder.step == launch["file_events"]["step"]:
            events.announce("trains-on")
            if fault is not None and fault.leaves:
                fault.strike(recorder, events.root, {"event": None, "op": "trains-on"})

    watch.came_around.append(came_around)
    watch.ended.append(lambda: events.announce("ends"))


def _watch_saves(events: FileEvents) -> None:
    for name in ("save", "async_save"):
        wrapped = _ending(events, getattr(dcp, name))
        setattr(dcp, name, wrapped)
        setattr(dcp.state_dict_saver, name, wrapped)
    torch.save = torch.serialization.save = _ending(events, torch.save, "f", 1)
    try:
        tensors: Any = importlib.import_module("safetensors.torch")
    except ImportError:
        return
    tensors.save_file = _ending(events, tensors.save_file, "filename", 1)


def _ending(events: FileEvents, plain: Any, argument: str | None = None, position: int = 0) -> Any:
    """Announce that a save call has returned and, where it opens a path unseen, its opening."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        target = args[position] if len(args) > position else kwargs.get(argument or "")
        if argument is not None and not events.watches(target):
            return plain(
                *args, **kwargs
            )  # every pickled tensor comes by here, on its way to memory
        inner = getattr(events._own, "saving", False)
        if argument is not None and _is_path(target):
            events.announce("open", _absolute(target))
        events._own.saving = True
        try:
            result = plain(*args, **kwargs)
        finally:
            events._own.saving = inner
        if not inner:
            events.announce("saved")
        return result

    return call


def _watch_collective(events: FileEvents, recorder: Recorder, name: str) -> None:
    plain = getattr(c10d, name, None)
    if plain is None:
        return
    signature = inspect.signature(plain)

    @recorder.guarded
    def note(*args: Any, **kwargs: Any) -> None:
        events.entered(name, signature.bind_partial(*args, **kwargs).arguments)

    before(c10d, name, note)
    setattr(torch.distributed, name, getattr(c10d, name))


def _root_rank(group: Any, arguments: dict[str, Any]) -> int | None:
    for name in ("src", "dst"):
        if arguments.get(name) is not None:
            return int(arguments[name])
        within = arguments.get(f"group_{name}")
        if within is not None:
            return int(c10d.get_global_rank(group, within))
    return 0
