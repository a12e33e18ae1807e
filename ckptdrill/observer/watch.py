"""Turn events into training steps: the one place that knows where in the loop the job is.

A *training step* is an optimizer step with a backward before it; `get_state_dict` itself calls
`optimizer.step()` to materialise state, and that is none. Jobs with several optimizers close a step
when one of them comes round again. The loop *has come around* at the first forward (or, for loops
that never call a module, the first backward) after a step: saves, logs and schedulers of that step
are done, nothing of the next has happened. That is where state is sampled and where a launch ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import Any, Callable

import torch

from . import (
    batches,
    copies,
    gradients,
    inventory,
    layers,
    names,
    packages,
    parting,
    program,
    state,
    storage,
    streams,
    window,
    zero,
)
from .facts import Recorder, leave
from .usage import uploaded, usage

_STAGE_MODULES = ("torch.distributed.pipelining.stage", "deepspeed.runtime.pipe.engine")
# It steps with a rate of 0, so that an optimizer that has not stepped has a state to fill.
_MAKES_STATE_BY_STEPPING = "torch.distributed.checkpoint.state_dict"
_TOLD_WITHIN_S = 5.0
_SURELY_A_STEP = 64  # backward calls: micro-batches of one step are fewer
_MAX_CALLS = 256  # of one micro-batch whose inputs are recorded
_MAX_KEYS = 200  # key names listed of a load that did not fit
# Samples that no update is read from: projections, a third of the bytes, are left out there.
_NOT_TRAINING = ("made", "save")


class Watch:
    """The state of the loop, fed by the hooks."""

    def __init__(self, recorder: Recorder, launch: dict[str, Any]) -> None:
        self.recorder = recorder
        self.launch = launch
        self.folder = launch["folder"]
        self.world_size = int(launch["world_size"])
        self.stop_step = launch.get("stop_step")
        self._window = window.Window(launch) if launch.get("window") else None
        self._decided = False  # whether `stop_step` is the last word
        self.sample_steps = {0, *launch.get("sample_steps", ())}
        # Completed steps of which the next one's gradient is told.
        self.gradient_steps = {0, *launch.get("gradient_steps", ())}
        self.movable_steps = frozenset(launch.get("movable_steps") or ())
        self.resumes = bool(launch.get("first_step"))
        self.agree_timeout_s = float(launch.get("agree_timeout_s", 60.0))
        self.optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.schedulers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.scalers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.saves_begun = 0
        self.pending_saves: list[Any] = []
        self.uploads_noted: list[str] = []  # paths, as the saves to them ended
        self.phase = "start"
        self._roots: names.Roots | None = None
        self._losses: list[torch.Tensor] = []
        self._micro_batches = 0
        self._calls = 0  # of trained modules since the last backward, as far as they are recorded
        self._frozen_calls = 0  # likewise of modules that nobody trains
        self._called: dict[int, int] = {}  # module -> its number, in the order of first calls
        self._backwards = 0
        self._stepped_after: dict[int, int] = {}  # optimizer -> backward calls before its last step
        self._pipelined = False
        self._came_around = False
        # Optimizers of this round; of the last one, those that had a backward call to themselves:
        # another may follow them at every step, or at some.
        self._this_round: set[int] = set()
        self._led: set[int] = set()
        self._last_led: set[int] = set()
        self._unscaled: list[tuple[Any, torch.Tensor]] = []
        self._dtypes: set[str] = set()  # on the way back from the losses of this step
        self._drawn_from: tuple[str, ...] = ()  # where the generators stood when the step began
        self._other_stream_step = launch.get("other_stream_step")
        self._layers = layers.Layers() if launch.get("quiet") else None
        self._handed = (-1, -1)  # step and optimizer of the last gradient that was told
        self._trained: dict[int, bool] = {}
        self._copies: list[list[torch.Size]] | None = None  # of what is in no module
        self._sampled: tuple[int, str] = (-1, "")
        self._restored: list[tuple[Any, dict[str, Any]]] = []
        self.optimizer_events = 0
        self._engine_rates: list[Any] | None = None  # while an engine takes its step
        self.came_around: list[Callable[[], None]] = []  # called when a step is over
        self.ended: list[Callable[[], None]] = []  # called when the saves of the last step are, too
        self.agree_folder = os.path.join(self.folder, "agree")
        self.leaving = False  # this rank has arrived for good
        # Whoever samples, or ends this process, has the turn: the job, or the thread of `parting`.
        self._turn = threading.RLock()
        self._stepping = 0  # the thread that has made the last step

    # ---------------------------------------------------------------- events, in loop order

    def forward(self, module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """A module is called while forward is being waited for; True when it is a
        training step's.
        """
        if not (torch.is_grad_enabled() and self._is_trained(module)):
            return False
        if any(program.called_from(stage) for stage in _STAGE_MODULES):
            return self._pipelined  # seen at the stage; it also calls its module to learn shapes
        self._come_around("forward")
        self._calls = 0
        self._note_batch(module, (inputs, named))
        return True

    def further_forward(self, module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """A module is called after the first of a micro-batch and before any backward: another
        micro-batch, another part of the model, or the same once more on other inputs.
        """
        if not (torch.is_grad_enabled() and self._is_trained(module)):
            return False
        if not self._pipelined and self._calls < _MAX_CALLS:
            self._note_batch(module, (inputs, named))
        return True

    def frozen_forward(self, module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """A module of parameters that nobody steps on is called with gradients on: what it is given
        are the samples, and what it makes of them comes to the trained ones.
        """
        if not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return False
        if self._frozen_calls >= _MAX_CALLS:
            return True
        rows, _ = batches.sample_hashes((inputs, named))
        if not rows:
            return False
        self._frozen_calls += 1
        self.recorder.record("batch", micro=self._micro_batches, rows=rows, frozen=True)
        return True

    def _note_batch(self, module: Any, inputs: Any) -> None:
        """Record what a call is given: samples, or else the activations that came to it; a further
        call that is only given activations adds nothing.
        """
        rows, shorter = batches.sample_hashes(inputs)
        if not rows and self._calls:
            return
        more: dict[str, Any] = {"shapes": batches.row_shapes(inputs)}
        if any(shorter):
            more["shorter"] = shorter
        if not rows:
            more["activations"] = batches.row_hashes(inputs, activations=True)
        called = self._called.setdefault(id(module), len(self._called))
        self.recorder.record(
            "batch", micro=self._micro_batches, rows=rows, call=self._calls, called=called, **more
        )
        self._calls += 1

    def schedule_begins(self) -> None:
        """A pipeline schedule begins its step."""
        if torch.is_grad_enabled():
            self._pipelined = True
            self._come_around("forward")

    def stage_forward(self, stage: int, chunk: int, inputs: Any) -> None:
        """A stage begins a micro-batch: of samples, or of activations on later stages."""
        if torch.is_grad_enabled():
            rows = [] if stage else batches.row_hashes(inputs)
            self.recorder.record("batch", micro=chunk, rows=rows, stage=stage)

    def scaled(self, scaled: Any, loss: Any) -> None:
        """A GradScaler made `scaled` of `loss`: remember the loss, the scaled one may be infinite
        where its gradients are not.
        """
        if isinstance(scaled, torch.Tensor) and isinstance(loss, torch.Tensor):
            self._unscaled.append((weakref.ref(scaled), loss.detach().clone()))

    def backward(self, tensors: Any) -> None:
        """The outermost backward call begins: its scalar roots are the loss of a micro-batch."""
        self._come_around("backward")
        self._calls = self._frozen_calls = 0
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        for root in roots:
            if isinstance(root, torch.Tensor) and root.numel() == 1:
                losses = [loss for scaled, loss in self._unscaled if scaled() is root]
                self._losses.append(losses[0] if losses else root.detach().clone())
        self._unscaled.clear()
        if self.recorder.step in self.gradient_steps:
            self._dtypes |= gradients.dtypes(roots)
        self._micro_batches += 1
        self._backwards += 1
        if self._backwards == _SURELY_A_STEP and not self._stepped_after:
            self.recorder.record("unstepped", backwards=self._backwards)

    def engine_steps(self, optimizer: Any) -> None:
        """DeepSpeed begins a step: it lets the optimizer step once for each of its flat tensors,
        with one group at a time, and then moves the schedule on.
        """
        self._engine_rates = state.learning_rates(optimizer)

    def engine_stepped(self, optimizer: Any, skipped: bool) -> None:
        """DeepSpeed has made its step, with the rates that stood in all groups at its beginning."""
        rates, self._engine_rates = self._engine_rates, None
        self.stepped(optimizer, skipped, rates)

    def about_to_step(self, optimizer: Any) -> None:
        """An optimizer is about to step: at a few steps the gradient that it is handed is told."""
        position = self._position(optimizer)
        if position < 0:
            return
        begins = not self._this_round or position in self._this_round
        before = self.recorder.step if begins else self.recorder.step - 1
        of_engine = self._engine_rates is not None
        stepped = self._backwards == self._stepped_after.get(position, 0)
        if before not in self.gradient_steps or (stepped and not of_engine):
            return
        if of_engine or not program.called_from(_MAKES_STATE_BY_STEPPING):
            self._record_gradient(optimizer, position, before + 1)

    def _record_gradient(self, optimizer: Any, position: int, step: int) -> None:
        roots = self._roots = self._roots or names.find_roots(self._optimized())
        flats = zero.Flats(module for _, module in roots.modules)
        found = state.gradient(optimizer, roots.by_parameter(), flats, position)
        if self._layers is not None and step == 1:
            self.recorder.record("outputs", layers=self._layers.told())
            self._layers = None
        if found:
            self._handed = (step, position)
            self.recorder.record(
                "gradient",
                of=step,
                optimizer=position,
                leaves=self.recorder.columns.of(found),
                dtypes=sorted(self._dtypes),
                matmul=torch.get_float32_matmul_precision(),
                drawn=self._drawn_from != state.drawn_from(),
            )

    def stepped(
        self, optimizer: Any, skipped: bool = False, rates: list[Any] | None = None
    ) -> None:
        """An optimizer has stepped (or its scaler skipped the step because of an overflow).

        Every optimizer may follow one backward call, each once.
        """
        position = self._position(optimizer)
        if self._engine_rates is not None or position < 0:
            return
        self.optimizer_events += 1
        if self._backwards == self._stepped_after.get(position, 0):
            return
        if program.called_from(_MAKES_STATE_BY_STEPPING):
            return
        leads = self._backwards > max(self._stepped_after.values(), default=0)
        self._stepped_after[position] = self._backwards
        begins = not self._this_round or position in self._this_round
        before = self.recorder.step if begins else self.recorder.step - 1
        if before in self.gradient_steps and self._handed != (before + 1, position):
            # Where a closure computes it, the gradient is only there once the step is made.
            self._record_gradient(optimizer, position, before + 1)
        if begins:
            self._last_led = self._led or {position}
            self._this_round, self._led = set(), set()
            self.recorder.step += 1
        self._this_round.add(position)
        if leads:
            self._led.add(position)
        self._came_around = False
        self.recorder.record(
            "stepped",
            optimizer=position,
            lr=state.learning_rates(optimizer) if rates is None else rates,
            losses=[float(loss) for loss in self._losses],
            micro_batches=self._micro_batches,
            counters={
                **program.loop_counters(sys._getframe()),
                **program.library_counters(sys._getframe()),
            },
            **({"skipped": True} if skipped else {}),
        )
        self._losses.clear()
        self._dtypes.clear()
        self._micro_batches = 0
        self.phase = "train"
        self.note_usage()

    def note_usage(self) -> None:
        """Memory, threads and saves in flight."""
        self.recorder.record("usage", **usage(self.pending_saves))
        self._begin_to_part()

    def saving(self, path: str = "") -> None:
        """A save to `path` begins: the state the job believes it is saving, once per step.

        The job's steps may have other numbers than ours: what is saved now is what a restore must
        come back to, whatever the matrix calls it, and the first update after it is compared.
        """
        self.saves_begun += 1
        if self._window is not None and path:
            self._window.saving(path, self.recorder.step)
        self.sample_steps |= {self.recorder.step, self.recorder.step + 1}
        if self._sampled != (self.recorder.step, "save"):
            with self._turn:
                self.sample("save")

    def movable_leaves(self, saved: Any) -> dict[str, Any]:
        """What an `inventory` fact of a save has beside its leaves, at the steps where it is asked
        for.
        """
        if self.recorder.step not in self.movable_steps:
            return {}
        return {"movable": self.recorder.columns.of(inventory.movable_leaves(saved))}

    def optimizer_made(self) -> None:
        """A new optimizer: what is trained must be looked up again."""
        self.parameters_joined()
        if self.resumes and len(self.optimizers) == 1:
            self.sample("made")  # what stands here where nothing is restored
            self._roots = None  # wrappers and averaged copies are still to come

    def parameters_joined(self) -> None:
        """A group of parameters joins an optimizer: gradual unfreezing trains further modules."""
        self._trained.clear()
        self._roots = self._copies = None

    def module_restored(self, fit: Any, module: Any, state_dict: Any, *_: Any, **__: Any) -> None:
        """A module's `load_state_dict` returned `fit`: what stands in it now, and which keys did
        not fit.
        """
        if self.recorder.step:
            return
        part = names.Roots([("", weakref.ref(module))])
        put = {
            "values": {
                **{name: state.entry(p) for name, p in part.parameters()},
                **{name: state.entry(b) for name, b, _ in part.buffers()},
            },
            "missing": list(getattr(fit, "missing_keys", ()))[:_MAX_KEYS],
            "unexpected": list(getattr(fit, "unexpected_keys", ()))[:_MAX_KEYS],
            "keys": len(state_dict),
        }
        self._restored.append((weakref.ref(module), put))

    def _record_restored(self) -> None:
        """Which of the modules that were loaded into are trained is known at the first forward."""
        trained = {
            id(child)
            for _, root in (self._roots or names.find_roots(self._optimized())).modules
            if self._is_trained(root)
            for child in root.modules()
        }
        for reference, put in self._restored:
            if id(reference()) in trained:
                # Columns may point to earlier ones of the file, so they are made when written.
                put["values"] = self.recorder.columns.of(put["values"])
                self.recorder.record("restored", part="weights", **put)
        self._restored.clear()

    def optimizer_restored(self, _: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        """An optimizer's `load_state_dict` returned."""
        if self.recorder.step == 0:
            roots = self._roots or names.find_roots(self._optimized())
            flats = zero.Flats(module for _, module in roots.modules)
            values = state.optimizer_state([optimizer], roots.by_parameter(), flats)
            columns = self.recorder.columns.of(values)
            self.recorder.record("restored", part="optimizer", values=columns)

    def rng_set(self, by: str, *_: Any, **__: Any) -> None:
        """A generator was set or seeded before the first step."""
        if self.recorder.step == 0:
            self.recorder.record("rng_set", by=by, kinds=state.random_state())

    # ---------------------------------------------------------------- samples and the end

    def sample(self, moment: str) -> None:
        """Record the whole state under `moment` (`forward`, `save`, `backward`)."""
        began = time.perf_counter()
        # Walking every live object costs a fifth of a second, so it is done once per optimizer.
        roots = self._roots = self._roots or names.find_roots(self._optimized())
        facts = state.describe(
            roots,
            self._outermost(),
            self._in_order(self.schedulers),
            self._in_order(self.scalers),
            self.recorder.columns,
            projected=moment not in _NOT_TRAINING,
            moves=moment not in _NOT_TRAINING and self.recorder.step in self.movable_steps,
        )
        self.recorder.record("roots", **state.kinds(roots))
        # The time first: behind it, a state that came back bit by bit has the same bytes.
        took_s = round(time.perf_counter() - began, 6)
        self.recorder.record("state", took_s=took_s, at=moment, **facts)
        held = roots.generators(state.is_generator)
        known = {id(generator) for generator in held.values()}
        framed = program.generators(self._frame(), state.is_generator)
        held.update((name, each) for name, each in framed.items() if id(each) not in known)
        self.recorder.record("rng", at=moment, kinds=state.random_state(held))
        if moment not in _NOT_TRAINING:
            for name, leaves in copies.find(self._frame(), roots).items():
                held_leaves = self.recorder.columns.of(leaves)
                self.recorder.record("inventory", at="held", name=name, leaves=held_leaves)
            self.recorder.record("variables", values=program.numbers(self._frame()))
        self._sampled = (self.recorder.step, moment)

    def _come_around(self, moment: str) -> None:
        if self._came_around or not self._round_is_over():
            return
        with self._turn:
            self._come_around_once(moment)

    def _round_is_over(self) -> bool:
        return self._this_round >= self._last_led

    def _come_around_once(self, moment: str) -> None:
        self._came_around = True
        step = self.recorder.step
        for note in self.came_around:
            note()
        if step == 0:
            self.recorder.record("code", files=program.code_files())
            self.recorder.record("imported", packages=packages.imported())
            self._record_restored()  # first: the sampled state refers to values that it tells
        if self._window is not None and self._window.saved_at(step):
            self.sample_steps |= {step, step + 1}
            self.gradient_steps |= {step, step + 1, step + 2}
        if step in self.sample_steps:
            self.sample(moment)
        if step == 0 and self._layers is not None and self._roots is not None:
            self._layers.watch(self._roots)
        if step in self.gradient_steps:
            self._drawn_from = state.drawn_from()
        if step == self._other_stream_step:
            streams.begin_another()
        if self._is_over():
            self._stop()

    def _is_over(self) -> bool:
        """Whether the last wanted step is completed: that of the launch, or the one at which the
        window after the wanted save ends, where the job numbers its steps otherwise.
        """
        step = self.recorder.step
        if self.stop_step is None or step < self.stop_step:
            return False
        if self._window is None or self._decided:
            return True
        until = self._window.until()
        self._decided = until is not None or self._window.waits_in_vain(step)
        if until is not None and until > self.stop_step:
            self.stop_step = until
            self.sample_steps |= {until - 1, until}
            self.recorder.record("until", last_step=until)
        return self._decided and step >= self.stop_step

    def _stop(self) -> None:
        """Leave when every rank has come this far; the ranks agree through files,
        not collectives.
        """
        self.leaving = True
        self._finish_saves()
        for note in self.ended:
            note()
        agreed = parting.agree(
            self.agree_folder, self.recorder.rank, self.world_size, self.agree_timeout_s
        )
        self._leave(agreed=agreed)

    def _leave(self, **how: Any) -> None:
        storage.conclude(self.recorder, self.launch)
        self.recorder.record_durably("stopped", **how)
        leave(0)

    # ---------------------------------------------------------------- ranks that wait at the end

    def _begin_to_part(self) -> None:
        """After the last wanted step, have this thread looked at."""
        made = parting.last_step(self.launch) is not None and self._is_over()
        if made and self.world_size > 1 and not self._stepping:
            self._stepping = threading.get_ident()
            parting.look_on(self)

    def is_at_rest(self) -> bool:
        """The last step is made, nothing is being saved, and the observer itself does nothing."""
        if not self._round_is_over() or self.phase != "train":
            return False
        done = sum(uploaded(save).done() for save in self.pending_saves)
        if done < len(self.pending_saves) or len(self.uploads_noted) < done:
            return False
        free = self._turn.acquire(blocking=False)
        if free:
            self._turn.release()
        return free

    def sample_last(self) -> None:
        """The state of a rank that waits after its last step: nothing changes it any more."""
        with self._turn:
            if self.recorder.step in self.sample_steps and not self._came_around:
                self.sample("forward")

    def leave_standing(self, where: dict[str, str]) -> None:
        """End this process from another thread than the job's, which waits at `where`."""
        with self._turn:
            if not self.leaving:
                self.leaving = True
                self._leave(agreed=True, waiting=where)

    def let_part(self) -> None:
        """Comes back unless this process is being left: then what happens to the job follows."""
        with self._turn:
            pass

    def program_ended(self, well: bool) -> None:
        """The program is over: the others need not wait for this rank, if it has made its steps."""
        with self._turn:
            made = self.stop_step is None or self._is_over()
            if well or made:
                self.leaving = True
                parting.arrive(self.agree_folder, self.recorder.rank)

    def _finish_saves(self) -> None:
        """A real job would have gone on while an asynchronous save completes."""
        for future in self.pending_saves:
            try:
                uploaded(future).result(timeout=self.agree_timeout_s)
            except BaseException as error:
                if not uploaded(future).done():  # else the save has failed: `uploaded` says so
                    self.recorder.failed("waiting for an asynchronous save", error)
        # A future wakes whoever waits for it before it calls those who want to be told.
        ended = sum(uploaded(save).done() for save in self.pending_saves)
        deadline = time.monotonic() + _TOLD_WITHIN_S
        while len(self.uploads_noted) < ended and time.monotonic() < deadline:
            time.sleep(0.005)

    # ---------------------------------------------------------------- helpers

    def _frame(self) -> Any:
        """The innermost frame of the job. Not to be kept in a variable: it would keep the job's."""
        if self._stepping in (0, threading.get_ident()):
            return sys._getframe(1)
        return sys._current_frames()[self._stepping]

    def _is_trained(self, module: Any) -> bool:
        known = self._trained.get(id(module))
        if known is None:
            known = names.trains(module, self._optimized()) or self._has_copies(module)
            self._trained[id(module)] = known
        return known

    def _has_copies(self, module: Any) -> bool:
        """Whether an optimizer steps on copies of the module's parameters."""
        if self._copies is None:
            self._copies = names.copies_of(self._outermost())
        return any(names.stand_for(each, module, self.world_size) for each in self._copies)

    def _optimized(self) -> dict[int, int]:
        """The identity of each stepped parameter -> its place in the order of the optimizers."""
        parameters = (
            parameter
            for optimizer in self._outermost()
            for group in getattr(optimizer, "param_groups", [])
            for parameter in group["params"]
        )
        return {id(parameter): place for place, parameter in enumerate(parameters)}

    def _position(self, optimizer: Any) -> int:
        known = self._outermost()
        return next((i for i, o in enumerate(known) if o is optimizer), -1)

    def _outermost(self) -> list[Any]:
        """The optimizers of the job, without those inside another one, which stands for them."""
        known = self._in_order(self.optimizers)
        inside = {id(inner) for each in known if (inner := state.inner(each)) is not each}
        return [each for each in known if id(each) not in inside]

    @staticmethod
    def _in_order(tracked: Any) -> list[Any]:
        return [tracked[key] for key in sorted(tracked.keys()) if key in tracked]
