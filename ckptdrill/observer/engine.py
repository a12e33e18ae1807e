"""Wrap the entry points of DeepSpeed's engine, once the job has imported it.

An engine drives the job's optimizer, its schedule and its checkpoints: a step is one call of
`_take_model_step` (which lets the optimizer step group by group), a save or load one call of
`save_checkpoint` or `load_checkpoint` (which go through many files), a pipeline's loop comes around
in `train_batch`. `install` is called whenever the job makes an optimizer: by then it has imported
what it trains with. A load says by which mechanism it restored, and whether it found anything at
all: the engine returns nothing where the pointer is missing, and raises nothing.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from . import inventory
from .zero import innermost

if TYPE_CHECKING:
    from .facts import Recorder
    from .watch import Watch

SAVE, LOAD = "deepspeed.save_checkpoint", "deepspeed.load_checkpoint"
_MARK = "_ckptdrill_observes"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOAD_ARGUMENTS = (
    "load_dir",
    "tag",
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
)


def install(watch: Watch, recorder: Recorder, hooks: Any) -> None:
    """Wrap the classes of the engines, if the job has imported them; once.

    `hooks` is the module of the general hooks, which time saves and loads.
    """
    module = sys.modules.get("deepspeed.runtime.engine")
    engine = getattr(module, "DeepSpeedEngine", None)
    if engine is None or getattr(engine, _MARK, False):
        return
    setattr(engine, _MARK, True)
    _wrap_step(engine, watch, recorder)
    save = hooks.timed("save", SAVE, watch, recorder, *_saver(watch, recorder), _save_path)
    load = hooks.timed("load", LOAD, watch, recorder, *_loader(recorder), _load_path)
    engine.save_checkpoint = save(engine.save_checkpoint)
    engine.load_checkpoint = load(engine.load_checkpoint)
    pipeline = sys.modules.get("deepspeed.runtime.pipe.engine")
    if pipeline is not None:
        _wrap_pipeline(pipeline.PipelineEngine, watch, recorder, hooks)


def _wrap_step(engine: Any, watch: Watch, recorder: Recorder) -> None:
    plain_step = engine._take_model_step
    begin = recorder.guarded(lambda self: watch.engine_steps(innermost(self.optimizer)))
    end = recorder.guarded(
        lambda self, skipped: watch.engine_stepped(
            innermost(self.optimizer), getattr(self, "skipped_steps", 0) > skipped
        )
    )

    @functools.wraps(plain_step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        skipped = getattr(self, "skipped_steps", 0)
        begin(self)
        result = plain_step(self, *args, **kwargs)
        end(self, skipped)
        return result

    engine._take_model_step = step


def _wrap_pipeline(engine: Any, watch: Watch, recorder: Recorder, hooks: Any) -> None:
    begin = recorder.guarded(watch.schedule_begins)
    chunk = recorder.guarded(watch.stage_forward)

    @recorder.guarded
    def forward(self: Any, buffer_id: int) -> None:
        inputs = self.pipe_buffers["inputs"][buffer_id] if self.stage_id == 0 else ()
        chunk(self.stage_id, buffer_id, inputs)

    hooks.before(engine, "train_batch", lambda *_, **__: begin())
    plain = engine._exec_forward_pass
    hooks.before(engine, "_exec_forward_pass", forward)
    for instruction, run in engine._INSTRUCTION_MAP.items():
        if run is plain:  # the engine finds it here, not by its name
            engine._INSTRUCTION_MAP[instruction] = engine._exec_forward_pass


def _saver(watch: Watch, recorder: Recorder) -> tuple[Any, Any]:
    """What is noted before and after a save: the state, and what the job and the engine count."""
    sample = recorder.guarded(watch.saving)

    def before(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample(path)
        recorder.record("save_begin", call=SAVE, path=path)
        own = kwargs.get("client_state", args[3] if len(args) > 3 else {})
        counted = {name: getattr(args[0], name, None) for name in _COUNTERS}
        _record_leaves(recorder, "save", SAVE, path, {"client_state": own, "engine": counted})

    return before, lambda *_: None


def _loader(recorder: Recorder) -> tuple[Any, Any]:
    def before(path: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        recorder.record("load_begin", call=LOAD, path=path)

    def after(path: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found, state = result if isinstance(result, tuple) else (result, None)
        mechanism = mechanism_of(args[0], arguments_of(args[1:], kwargs))
        recorder.record("engine_load", path=path, found=found is not None, mechanism=mechanism)
        _record_leaves(recorder, "load", LOAD, path, {"client_state": state or {}})

    return before, after


def _record_leaves(recorder: Recorder, at: str, call: str, path: str, value: Any) -> None:
    leaves = recorder.columns.of(inventory.leaves(value))
    recorder.record("inventory", at=at, call=call, path=path, leaves=leaves)


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `load_checkpoint` by name, those that were given."""
    return {**dict(zip(_LOAD_ARGUMENTS, args)), **kwargs}


def mechanism_of(engine: Any, given: dict[str, Any]) -> str:
    """How a load brings the training back, in words."""
    if given.get("load_module_only"):
        return "weights only"
    universal = getattr(engine, "load_universal_checkpoint", None)
    kind = "universal checkpoint" if universal is not None and universal() else "same layout"
    left_out = [
        what
        for key, what in (
            ("load_optimizer_states", "optimizer"),
            ("load_lr_scheduler_states", "schedule"),
        )
        if given.get(key) is False
    ]
    return f"{kind}, without {' and '.join(left_out)}" if left_out else kind


def _save_path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = dict(zip(("save_dir", "tag"), args[1:]), **kwargs)
    tag = given.get("tag")
    tag = f"global_step{args[0].global_steps}" if tag is None else str(tag)
    return os.path.abspath(os.path.join(given["save_dir"], tag))


def _load_path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The folder that is asked for; without a tag, the one whose pointer the engine follows."""
    given = arguments_of(args[1:], kwargs)
    return os.path.abspath(os.path.join(given["load_dir"], str(given.get("tag") or "")))
