"""Wrap the few torch entry points every training loop goes through. `install` does all of it, once.

Loop events: optimizer steps (torch's own global hooks), `torch.autograd.backward`, and the first
module call of a micro-batch. The latter is seen through `nn.Module.__call__`. Once the job compiles
anything, that is exchanged only while a forward is being waited for, so that nothing of the
observer is ever inside a compiled region. Construction of optimizers, schedulers and scalers is
noted weakly. Saves and loads are timed, and an exception out of one is recorded with its chain
before it goes on to the job.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import time
from typing import Any, Callable

import torch
import torch.distributed.checkpoint as dcp
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import file_baton

from . import engine, inventory
from .facts import Recorder, chain
from .usage import uploaded
from .watch import Watch

_depth = threading.local()


def install(watch: Watch, recorder: Recorder) -> None:
    """Put every hook in place."""
    for part in (
        _forward_hook,
        _backward_hook,
        _optimizer_hooks,
        _scheduler_hooks,
        _scaler_hooks,
        _restore_hooks,
        _checkpoint_hooks,
        _process_group_hook,
        _extension_hook,
    ):
        recorder.guarded(part)(watch, recorder)


# ------------------------------------------------------------------------------------ loop events

_plain_call = torch.nn.Module.__call__


class _Forward:
    """Whether a forward is being waited for, whether one that counts is under way (what it calls
    is no batch), and whether the job compiles.
    """

    awaited = False
    inside = False
    compiles = False
    watched_call: Any = None


class _Backward:
    """How many backward calls are under way, on whatever threads: autograd has some of its own."""

    depth = 0


def _forward_hook(watch: Watch, recorder: Recorder) -> None:
    first, further = recorder.guarded(watch.forward), recorder.guarded(watch.further_forward)
    frozen = recorder.guarded(watch.frozen_forward)

    def watched_call(self: Any, *inputs: Any, **named: Any) -> Any:
        # Inside a call that counts, other modules get what it makes of the batch; what is called
        # while gradients are computed is computed again.
        if _Forward.inside or _Backward.depth:
            return _plain_call(self, *inputs, **named)
        if _Forward.awaited:
            counts = first(self, inputs, named)
            if counts:
                _Forward.awaited = False
                _settle()
        else:
            counts = further(self, inputs, named)
        if not (counts or frozen(self, inputs, named)):
            return _plain_call(self, *inputs, **named)
        _Forward.inside = True
        try:
            return _plain_call(self, *inputs, **named)
        finally:
            _Forward.inside = False

    _Forward.watched_call = watched_call
    before(torch, "compile", _compiles)
    before(torch.nn.Module, "compile", _compiles)


def in_a_model() -> bool:
    """Whether a call of a trained module that counts is under way."""
    return _Forward.inside


def _await_forward() -> None:
    _Forward.awaited = True
    _settle()


def _compiles(*_: Any, **__: Any) -> None:
    _Forward.compiles = True
    _settle()


def _settle() -> None:
    """Put the watched call in place, or take it away from what is going to be compiled.

    Each assignment makes Python forget what it knows of all module classes, a millisecond at the
    next calls; so without compilation it is made once.
    """
    wanted = _Forward.watched_call if _Forward.awaited or not _Forward.compiles else _plain_call
    if wanted is not None and torch.nn.Module.__call__ is not wanted:
        torch.nn.Module.__call__ = wanted  # type: ignore[method-assign]


def before(holder: Any, name: str, note: Callable[..., Any]) -> None:
    """`note` sees the arguments of every call of `holder.name` before it is made, where there is
    such a thing.
    """
    plain = getattr(holder, name, None)
    if plain is None:
        return

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(holder, name, call)


def _backward_hook(watch: Watch, recorder: Recorder) -> None:
    plain_backward = torch.autograd.backward
    observe = recorder.guarded(watch.backward)

    @functools.wraps(plain_backward)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if _Backward.depth == 0:
            observe(tensors)
        # Reentrant activation checkpointing calls backward inside backward: not a loss of its own.
        _Backward.depth += 1
        try:
            return plain_backward(tensors, *args, **kwargs)
        finally:
            _Backward.depth -= 1
            if _Backward.depth == 0:
                _await_forward()

    torch.autograd.backward = backward


def _optimizer_hooks(watch: Watch, recorder: Recorder) -> None:
    noted = recorder.guarded(watch.optimizer_made)
    pipelines = recorder.guarded(_pipeline_hook)
    engines = recorder.guarded(engine.install)

    def made() -> None:
        noted()
        pipelines(watch, recorder)
        engines(watch, recorder, sys.modules[__name__])
        _await_forward()

    _remember(torch.optim.Optimizer, watch.optimizers, recorder, then=made)
    joined = recorder.guarded(watch.parameters_joined)
    before(torch.optim.Optimizer, "add_param_group", lambda *_, **__: joined())
    observe = recorder.guarded(watch.stepped)
    handed = recorder.guarded(watch.about_to_step)
    register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: handed(optimizer))

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        observe(optimizer)
        _await_forward()

    register_optimizer_step_post_hook(after_step)


def _pipeline_hook(watch: Watch, recorder: Recorder) -> None:
    """A pipeline's loop comes around where its schedule begins a step: inside, stages wait for each
    other. A stage runs several forwards before its first backward, each a micro-batch.

    Called once the job has an optimizer: by then it has imported what it pipelines with.
    """
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None or hasattr(schedules.PipelineScheduleSingle.step, "__wrapped__"):
        return
    begin = recorder.guarded(watch.schedule_begins)
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        before(kind, "step", lambda *_, **__: begin())
    stage = sys.modules["torch.distributed.pipelining.stage"]
    chunk = recorder.guarded(watch.stage_forward)
    before(
        stage._PipelineStageBase,
        "forward_one_chunk",
        lambda stage, number, inputs, *_, **__: chunk(stage.stage_index, number, inputs),
    )


def _scheduler_hooks(watch: Watch, recorder: Recorder) -> None:
    """Some of torch's schedulers do not call the base constructor, so each class is wrapped."""
    base = torch.optim.lr_scheduler.LRScheduler
    for cls in list(vars(torch.optim.lr_scheduler).values()):
        if isinstance(cls, type) and issubclass(cls, base) and "__init__" in vars(cls):
            _remember(cls, watch.schedulers, recorder)


def _scaler_hooks(watch: Watch, recorder: Recorder) -> None:
    scaler = torch.amp.GradScaler
    _remember(scaler, watch.scalers, recorder)
    plain_scale, plain_step = scaler.scale, scaler.step
    noted = recorder.guarded(watch.scaled)
    skipped = recorder.guarded(watch.stepped)

    @functools.wraps(plain_scale)
    def scale(self: Any, outputs: Any) -> Any:
        result = plain_scale(self, outputs)
        noted(result, outputs)
        return result

    @functools.wraps(plain_step)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = watch.optimizer_events
        result = plain_step(self, optimizer, *args, **kwargs)
        if watch.optimizer_events == before:
            skipped(optimizer, skipped=True)
            _await_forward()
        return result

    scaler.scale, scaler.step = scale, step  # type: ignore[method-assign]


def _remember(
    cls: Any, tracked: Any, recorder: Recorder, then: Callable[[], None] | None = None
) -> None:
    """Note every instance of `cls` weakly, in order of construction."""
    plain_init = cls.__init__

    @recorder.guarded
    def note(instance: Any) -> None:
        if not any(known is instance for known in list(tracked.values())):
            tracked[len(tracked) and max(tracked.keys()) + 1] = instance

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        note(self)
        if then is not None:
            then()

    cls.__init__ = init


# ------------------------------------------------------------------------------- saves and loads


def _checkpoint_hooks(watch: Watch, recorder: Recorder) -> None:
    for name in ("save", "async_save"):
        _wrap_everywhere(dcp, "state_dict_saver", name, _saver(name, watch, recorder))
    _wrap_everywhere(dcp, "state_dict_loader", "load", _loader("load", watch, recorder))
    torch.save = _saver("torch.save", watch, recorder)(torch.save)
    torch.load = _loader("torch.load", watch, recorder)(torch.load)
    torch.serialization.save, torch.serialization.load = torch.save, torch.load


def _wrap_everywhere(package: Any, module: str, name: str, wrap: Callable[[Any], Any]) -> None:
    wrapped = wrap(getattr(package, name))
    setattr(package, name, wrapped)
    setattr(getattr(package, module), name, wrapped)


def _saver(name: str, watch: Watch, recorder: Recorder) -> Callable[[Any], Any]:
    """Wrap a save call: state and inventory at its beginning, facts around it, its future kept."""
    sample = recorder.guarded(watch.saving)

    def before(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.current_thread() is threading.main_thread() and watch.optimizers:
            sample(path)
        recorder.record("save_begin", call=name, path=path)
        saved = args[0] if args else kwargs.get("state_dict", kwargs.get("obj"))
        recorder.record(
            "inventory",
            at="save",
            call=name,
            path=path,
            leaves=recorder.columns.of(inventory.leaves(saved)),
            **watch.movable_leaves(saved),
        )

    def after(path: str, result: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if name == "async_save":
            watch.pending_saves.append(result)
            watch.note_usage()
            uploaded(result).add_done_callback(functools.partial(note_upload, path))

    @recorder.guarded
    def note_upload(path: str, future: Any) -> None:
        failure = future.exception()
        recorder.record_durably(
            "uploaded", path=path, error=chain(failure) if failure is not None else None
        )
        watch.uploads_noted.append(path)

    return timed("save", name, watch, recorder, before, after)


def _loader(name: str, watch: Watch, recorder: Recorder) -> Callable[[Any], Any]:
    """Wrap a load call: what it gave the job, leaf by leaf (DCP fills its argument in place)."""

    def before(path: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        recorder.record("load_begin", call=name, path=path)

    def after(path: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        loaded = result if name == "torch.load" else (args[0] if args else kwargs.get("state_dict"))
        recorder.record(
            "inventory",
            at="load",
            call=name,
            path=path,
            leaves=recorder.columns.of(inventory.leaves(loaded)),
        )

    return timed("load", name, watch, recorder, before, after)


def timed(
    kind: str,
    name: str,
    watch: Watch,
    recorder: Recorder,
    before: Callable[..., None],
    after: Callable[..., None],
    path_of: Callable[..., str] | None = None,
) -> Callable[[Any], Any]:
    """Only the outermost call of a thread is recorded: DCP and DeepSpeed themselves call torch.save
    and torch.load. `path_of` finds the path in the arguments of a call that is not torch's.
    """
    before, after = recorder.guarded(before), recorder.guarded(after)
    path_of = recorder.guarded(path_of or (lambda args, kwargs: _path(name, args, kwargs)))

    @recorder.guarded
    def note_refusal(path: str, error: BaseException) -> None:
        recorder.record_durably("refused", during=kind, call=name, path=path, error=chain(error))

    @recorder.guarded
    def note_end(path: str, began: float) -> None:
        took_s = round(time.perf_counter() - began, 6)
        recorder.record_durably(f"{kind}_end", call=name, path=path, took_s=took_s)

    def wrap(plain: Any) -> Any:
        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(_depth, "storage", False):
                return plain(*args, **kwargs)
            path = path_of(args, kwargs) or ""
            inner = _finishes_async_save()
            if not inner:
                before(path, args, kwargs)
            phase, watch.phase = watch.phase, kind
            _depth.storage = True
            began = time.perf_counter()
            try:
                result = plain(*args, **kwargs)
            except BaseException as error:
                note_refusal(path, error)
                raise
            finally:
                _depth.storage = False
            watch.phase = phase
            note_end(path, began)
            if not inner:
                after(path, result, args, kwargs)
            return result

        return call

    return wrap


def _finishes_async_save() -> bool:
    """True on the thread in which DCP completes an `async_save`: the job's own call has been
    recorded, and the loop may be at a later step by now.
    """
    return threading.current_thread().name.startswith("AsyncCheckpointExecutor")


def _path(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The folder or file that a save or load names, absolute; empty when it is a plain stream."""
    if name == "torch.save":
        target = kwargs.get("f", args[1] if len(args) > 1 else None)
    elif name == "torch.load":
        target = kwargs.get("f", args[0] if args else None)
    else:
        holder = kwargs.get("storage_writer") or kwargs.get("storage_reader")
        target = kwargs.get("checkpoint_id") or getattr(holder, "path", None)
    if not isinstance(target, (str, os.PathLike)):
        target = getattr(target, "name", None)  # an open file knows its path
    return os.path.abspath(os.fspath(target)) if isinstance(target, (str, os.PathLike)) else ""


# --------------------------------------------------------------------- state put back, piece by
# piece


def _restore_hooks(watch: Watch, recorder: Recorder) -> None:
    """Note what each `load_state_dict` and RNG setter put in place: what a later initialiser
    overwrites can then be told from what was never restored.
    """
    note_module = recorder.guarded(watch.module_restored)
    note_optimizer = recorder.guarded(watch.optimizer_restored)
    _after(torch.nn.Module, "load_state_dict", note_module)
    _after(torch.optim.Optimizer, "load_state_dict", note_optimizer)
    note_rng = recorder.guarded(watch.rng_set)
    for holder in (torch, torch.random):
        for name in ("set_rng_state", "manual_seed"):
            _after(holder, name, functools.partial(note_rng, f"torch.{name}"))
    for name in ("setstate", "seed"):
        _after(random, name, functools.partial(note_rng, f"random.{name}"))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        for name in ("set_state", "seed"):
            _after(numpy.random, name, functools.partial(note_rng, f"numpy.random.{name}"))


def _after(holder: Any, name: str, note: Callable[..., None]) -> None:
    """Call `note(result, *arguments)` after the outermost call of `holder.name`."""
    plain = getattr(holder, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_depth, "restoring", False):
            return plain(*args, **kwargs)
        _depth.restoring = True
        try:
            result = plain(*args, **kwargs)
        finally:
            _depth.restoring = False
        note(result, *args, **kwargs)
        return result

    setattr(holder, name, call)


def _process_group_hook(_watch: Watch, recorder: Recorder) -> None:
    plain = torch.distributed.init_process_group

    @functools.wraps(plain)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        note()
        return result

    @recorder.guarded
    def note() -> None:
        group = torch.distributed
        recorder.record(
            "process_group", backend=group.get_backend(), world_size=group.get_world_size()
        )

    torch.distributed.init_process_group = init_process_group
    torch.distributed.distributed_c10d.init_process_group = init_process_group


def _extension_hook(_watch: Watch, recorder: Recorder) -> None:
    """Note who compiles an extension of torch at run time, and who waits for the one that does.

    A build takes a lock file and the others wait until it is gone, without a limit: a build that
    was killed leaves it behind, and every later start waits for nobody.
    """
    baton = file_baton.FileBaton
    plain_acquire, plain_wait, plain_release = baton.try_acquire, baton.wait, baton.release

    @recorder.guarded
    def note(self: Any, does: str) -> None:
        recorder.record_durably("extension", does=does, lock=os.path.abspath(self.lock_file_path))

    @functools.wraps(plain_acquire)
    def try_acquire(self: Any) -> Any:
        acquired = plain_acquire(self)
        if acquired:
            note(self, "builds")
        return acquired

    @functools.wraps(plain_wait)
    def wait(self: Any) -> Any:
        note(self, "waits")
        result = plain_wait(self)
        note(self, "done")
        return result

    @functools.wraps(plain_release)
    def release(self: Any) -> Any:
        result = plain_release(self)
        note(self, "done")
        return result

    for method in (try_acquire, wait, release):
        setattr(baton, method.__name__, method)
