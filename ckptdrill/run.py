"""Run the planned steps and record what happened. The effects of ckptdrill are here.

First every cell gets its folder and the observer its copy in the run folder. Then one loop, in one
thread: start what may start, look which launches have ended, write each change into the journal. At
the end the checkpoints that were restored from are compared with what they were. Being interrupted
is an ordinary end: everything that runs is stopped and the journal tells `--resume` where to go on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptdrill import convert, interrupt, resources, sources, tiers
from ckptdrill.equivalence import equivalent
from ckptdrill.errors import ExitCode, UserError
from ckptdrill.fact_files import read_launch
from ckptdrill.inflict import inflict
from ckptdrill.journal import Entry, StepState, locked, record, remove_tree, settle, wipe
from ckptdrill.judge import gradients
from ckptdrill.judge.trajectory import trajectory
from ckptdrill.launch import local
from ckptdrill.launchers import Mode, Pair, WarmParents, choose, pairs_of, probes
from ckptdrill.matrix import Matrix
from ckptdrill.model import Convert, Damage, Launch, Plan, Replay, Role, Step, to_json
from ckptdrill.plan import quiet_pair, steps_of
from ckptdrill.progress import Event, Report, ignore
from ckptdrill.repro import repro_script
from ckptdrill.saved import write_manifests
from ckptdrill.schedule import Assignment, Capacity, Graph, next_steps, skip_reasons
from ckptdrill.step import (
    Setting,
    cut_short,
    describe,
    ended_badly,
    first_step,
    lost_to_a_full_disk,
    out_of,
    out_of_reach,
    prepare,
    resumes_in_place,
    unmet,
)
from ckptdrill.store import (
    REPRO_NAME,
    RunFolder,
    last_bytes,
    read_json,
    write_atomic,
    write_json,
)

_POLL_S = 0.02
# How long cages get to end their launches after an interruption.
_STOP_TIMEOUT_S = 30.0
# Two clocks differ by this much without anybody having set one.
_CLOCK_DRIFT_S = 2.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class Options:
    """How a run is carried out; what is run stands in the matrix."""

    launcher: Mode = Mode.AUTO
    resume: bool = False
    keep: bool = False
    capacity: Capacity | None = None  # None: that of this machine
    report: Report = ignore
    budget_s: float | None = None  # no launch begins or goes on after so many seconds
    spent_s: float = 0.0  # of the budget, before this began
    order: tuple[str, ...] = ()  # cells by id, those that are wanted most first


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the last entry of every step, and whether its sources are what they were.

    `launchers` says for each environment in words how its launches were started.
    """

    steps: Mapping[str, Entry]
    source_changes: tuple[str, ...]
    launchers: Mapping[str, str]

    @property
    def code(self) -> ExitCode:
        """SOURCE_CHANGED, or AS_EXPECTED: verdicts are not known here."""
        return ExitCode.SOURCE_CHANGED if self.source_changes else ExitCode.AS_EXPECTED


@dataclass
class _Live:
    """A run in progress: what is over, what runs, and which launchers have proved equivalent."""

    setting: Setting
    graph: Graph
    plans: tuple[Plan, ...]
    options: Options
    capacity: Capacity
    pairs: Mapping[str, Pair]
    warm: WarmParents
    over: dict[str, Entry]
    watch: sources.Watch
    quiet: dict[str, tuple[Launch, ...]]  # what cells ask for beside their plans
    began: float = field(default_factory=time.monotonic)
    began_s: float = field(default_factory=time.time)  # by the wall clock, which may be moved
    running: dict[str, local.Running] = field(default_factory=dict)
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    verdicts: dict[Pair, str | None] = field(default_factory=dict)

    @property
    def run(self) -> RunFolder:
        return self.setting.run


def execute(
    matrix: Matrix, plans: Sequence[Plan], run: RunFolder, options: Options | None = None
) -> Outcome:
    """Carry out every step of `plans` in the folder `run` and record it.

    Raises UserError when another process holds the folder, the disk is full, the plans are not
    those the run began with, or the run is interrupted (after all that ran has been stopped).
    """
    options = options or Options()
    with _explained(run), locked(run), _terminable():
        live = _opened(matrix, tuple(plans), run, options)
        try:
            _begin_warm_parents(live)
            _drive(live)
        except KeyboardInterrupt as error:
            _stop(live)
            raise _interrupted(live) from error
        except BaseException:
            _stop(live)
            raise
        live.warm.close()
        return _closed(live)


def prune(run: RunFolder, launch_ids: Iterable[str]) -> int:
    """Delete the checkpoints of these launches, unless the run keeps all; the bytes freed."""
    freed = 0
    if _noted(run).get("keep"):
        return freed
    for launch_id in launch_ids:
        folder = run.work(launch_id)
        freed += sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
        remove_tree(folder)
    return freed


# --------------------------------------------------------------------------------------------------
# Begin


def _opened(matrix: Matrix, plans: tuple[Plan, ...], run: RunFolder, options: Options) -> _Live:
    steps = dict(steps_of(plans))
    drilled = [plan for plan in plans if plan.cell.drilled]
    if options.launcher is Mode.AUTO:
        steps |= probes(drilled)
    setting = Setting(matrix, run, steps)
    if run.journal.exists() and not options.resume:
        raise UserError(
            "this run has been started before",
            where=str(run.root),
            hint="continue it with --resume, or start a new one",
        )
    for plan in plans:
        _write_cell(setting, plan)
    _copy_observer(run, resources.observer_dir())
    over = settle(run, steps)
    quiet: dict[str, tuple[Launch, ...]] = {}
    expanded = expansion(plans, setting, over, quiet)
    setting = replace(setting, steps={**steps, **expanded})
    over = settle(run, expanded, over)
    if expanded:
        options.report(_planned(expanded))
    watch = sources.watch(setting)
    for step_id, entry in over.items():
        options.report(Event(step_id, entry.state, "before this resume"))
    _note(run, status="started", launcher=options.launcher.value, keep=options.keep)
    live = _Live(
        setting=setting,
        graph=Graph.of(setting.steps, _turns(plans, options.order)),
        plans=plans,
        options=options,
        capacity=options.capacity or Capacity.detect(),
        pairs=pairs_of(drilled, tuple(expanded.values())),
        warm=WarmParents(run.observer_pack, run.warm),
        over=over,
        watch=watch,
        quiet=quiet,
    )
    _write_replays(live, expanded)
    return live


def _write_cell(setting: Setting, plan: Plan) -> None:
    """`plan.json`, `repro.sh`, and the program that the matrix names for the cell: it is on disk
    before anything can happen to it.
    """
    folder, content = setting.run.cell(plan.cell.id), to_json(plan)
    known = folder / "plan.json"
    if known.exists() and read_json(known) != content:
        raise UserError(
            f"cell {plan.cell.id} was planned differently when this run began",
            where=str(known),
            hint="the matrix or a drill has changed: start a new run, without --resume",
        )
    write_json(known, content)
    if plan.cell.expect and plan.cell.expect.repro:
        write_atomic(folder / REPRO_NAME, Path(plan.cell.expect.repro.program).read_bytes())
    if plan.cell.drilled:
        _write_script(setting, plan)


def _write_script(setting: Setting, plan: Plan) -> None:
    script = setting.run.cell(plan.cell.id) / "repro.sh"
    write_atomic(script, repro_script(setting, plan))
    script.chmod(0o755)


def _write_scripts(live: _Live, damage: Damage) -> None:
    """Again, now that it is known what a guard has selected in place of the damaged copy."""
    for plan in live.plans:
        if plan.damage == damage:
            _write_script(live.setting, plan)


def _copy_observer(run: RunFolder, observer: Path) -> None:
    """Put the package that runs inside the job into the run folder, once and whole.

    A resumed run keeps the one it began with, so that its facts are of one make.
    """
    package = run.observer_pack / local.PACK_NAME
    if package.exists():
        # What a full disk cut short of compiled modules would be read as if it were whole.
        shutil.rmtree(package / "__pycache__", ignore_errors=True)
        return
    partial = run.observer_pack / f".partial.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for module in sorted(observer.glob("*.py")):
        shutil.copy(module, partial / module.name)
    partial.rename(package)


def _begin_warm_parents(live: _Live) -> None:
    """Import ahead: the first cold launch takes as long as the imports of all warm ones."""
    if live.options.launcher is Mode.TORCHRUN:
        return
    for launch in _open_launches(live):
        forced = live.options.launcher is Mode.WARM
        useful = forced or (launch.id in live.pairs and launch.role is not Role.SOURCE)
        known = {*live.warm.parents, *live.warm.refusals}
        if useful and launch.environment not in known:
            live.warm.begin(launch.environment, describe(live.setting, launch, "warm"))


def _open_launches(live: _Live) -> Iterator[Launch]:
    for step_id, step in live.graph.steps.items():
        if isinstance(step, Launch) and step_id not in live.over:
            yield step


# --------------------------------------------------------------------------------------------------
# The loop


def _drive(live: _Live) -> None:
    changed, importing = True, 0
    while len(live.over) < len(live.graph.steps):
        if _budget_is_spent(live):
            _leave_out(live)
            break
        was_importing, importing = importing, live.warm.importing_count()
        if changed or importing != was_importing:
            _compare_pairs(live)
            _skip(live)
            begun = _startable(live)
            for assignment in begun:
                _begin(live, assignment)
            changed = bool(begun)
        ended = [_collect(live, step_id) for step_id in tuple(live.running)]
        changed = changed or any(ended)
        if not changed:
            time.sleep(_POLL_S)
    _compare_pairs(live)  # nothing depends on the last ones any more, but the report names them


def _budget_is_spent(live: _Live) -> bool:
    """By the monotonic clock, which nobody sets."""
    options = live.options
    spent_s = options.spent_s + time.monotonic() - live.began
    return options.budget_s is not None and spent_s >= options.budget_s


def _leave_out(live: _Live) -> None:
    """Stop what runs and give up what waits: neither says anything about the job."""
    for step_id in tuple(live.running):
        _collect(live, step_id)  # what has just ended counts
    running = tuple(live.running)
    _end_running(live, lambda _: None)
    for step_id in (*running, *live.graph.steps):
        if step_id not in live.over:
            why = f"the time budget of {live.options.budget_s:.0f} s was used up"
            _finish(live, step_id, StepState.LEFT_OUT, why)


def _turns(plans: Sequence[Plan], order: Sequence[str]) -> dict[str, int]:
    """Step id -> the place of the first cell in `order` that needs it."""
    places = {cell_id: place for place, cell_id in enumerate(order)}
    turns: dict[str, int] = {}
    for plan in sorted(plans, key=lambda plan: places.get(plan.cell.id, len(places))):
        for step in plan.steps:
            turns.setdefault(step.id, places.get(plan.cell.id, len(places)))
    return turns


def _startable(live: _Live) -> tuple[Assignment, ...]:
    held = {launch.id for launch in _open_launches(live) if _held(live, launch)}
    return next_steps(live.graph, live.capacity, ended=live.over, running=live.devices, held=held)


def _held(live: _Live, launch: Launch) -> bool:
    launcher = _choice(live, launch)
    if launcher == Mode.WARM:
        return live.warm.importing(launch.environment)
    return launcher is None


def _choice(live: _Live, launch: Launch) -> str | None:
    return choose(launch, live.options.launcher, live.pairs.get(launch.id), live.verdicts)


def _skip(live: _Live) -> None:
    """Give up what cannot run, or what nothing needs because the sources it serves have failed."""
    settled = {*live.over, *live.running}
    lost = {step_id: entry.lost for step_id, entry in live.over.items() if entry.lost}
    reasons = skip_reasons(live.graph, lost, settled)
    reasons |= {i: r for i, r in _purposeless(live, lost).items() if i not in settled}
    for step_id, reason in reasons.items():
        _finish(live, step_id, StepState.SKIPPED, reason)


def _purposeless(live: _Live, lost: Mapping[str, str]) -> dict[str, str]:
    wanted, reasons = set[str](), dict[str, str]()
    for plan in live.plans:
        why = lost.get(plan.source.id)
        for step in plan.steps:
            if why is None:
                wanted.add(step.id)
            else:
                reasons[step.id] = f"{plan.source.id}: {why}"
    return {step_id: why for step_id, why in reasons.items() if step_id not in wanted}


def _begin(live: _Live, assignment: Assignment) -> None:
    """Start one step; a damage is also finished here, and so is what turns out to be impossible."""
    step = live.graph.steps[assignment.step_id]
    missing = unmet(live.setting, step)
    if missing is not None:
        _finish(live, step.id, StepState.SKIPPED, missing)
        return
    record(live.run, step.id, StepState.STARTED)
    live.options.report(Event(step.id, StepState.STARTED, _started_text(step)))
    try:
        if isinstance(step, Damage):
            inflict(live.setting, step)
            _write_scripts(live, step)
            _finish(live, step.id, StepState.ENDED)
        elif isinstance(step, Replay):
            interrupt.replay(live.setting, step)
            _finish(live, step.id, StepState.ENDED)
            _expand(live)
        elif isinstance(step, Convert):
            live.running[step.id] = convert.start(live.setting, step)
            live.devices[step.id] = assignment.devices
        else:
            live.running[step.id] = _start(live, step, assignment.devices)
            live.devices[step.id] = assignment.devices
    except (UserError, OSError) as error:
        _raise_if_disk_full(error)
        _finish(live, step.id, StepState.FAILED, f"could not be done: {_first_line(error)}")


def _started_text(step: Step) -> str:
    if isinstance(step, Replay):
        return "offline"
    if isinstance(step, Convert):
        return step.name
    return f"{step.topology.world_size} ranks" if isinstance(step, Launch) else step.kind.value


def expansion(
    plans: Sequence[Plan],
    setting: Setting,
    over: Mapping[str, Entry],
    quiet: dict[str, tuple[Launch, ...]] | None = None,
) -> dict[str, Step]:
    """The launches, by id, that the steps which have ended ask for. `quiet` remembers, by cell,
    what was found of pairs without random layers: looking reads the facts of two launches.
    """
    found: dict[str, Step] = {}
    for plan in plans:
        if quiet is not None and plan.cell.id not in quiet:
            pair = _quiet(plan, setting, over)
            if pair is not None:
                quiet[plan.cell.id] = pair
        found |= {launch.id: launch for launch in (quiet or {}).get(plan.cell.id, ())}
        step = plan.replay
        if step is not None and step.id in over and over[step.id].lost is None:
            content = read_json(setting.run.replay(step.id))
            asked = interrupt.launches(plan, content, in_place=resumes_in_place(setting))
            found |= {launch.id: launch for launch in asked}
    return found


def _quiet(plan: Plan, setting: Setting, over: Mapping[str, Entry]) -> tuple[Launch, ...] | None:
    """The pair of restores without random layers: where random numbers hide whether the first
    gradient is the same, or where it is not, to see in which layer that begins. None before it can
    be known.
    """
    pair = quiet_pair(plan)
    ended = [over.get(launch.id) for launch in (plan.source, plan.restore)]
    if not pair or any(entry is not None and entry.lost is not None for entry in ended):
        return ()
    if None in ended:
        return None
    saw = pair[0].stop_step - 1
    reference, restored = (
        trajectory(read_launch(setting.run, launch.id, launch.topology.world_size), begin)
        for launch, begin in ((plan.source, first_step(setting, plan.source)), (plan.restore, saw))
    )
    return pair if gradients.asks_for_quiet(reference, restored, saw + 1) else ()


def _expand(live: _Live) -> None:
    """Take up what the step that has just ended asks for; what an earlier one left is wiped."""
    asked = expansion(live.plans, live.setting, live.over, live.quiet)
    for step_id in asked.keys() - live.graph.steps.keys():
        wipe(live.run, asked[step_id])
    if not asked.keys() - live.graph.steps.keys():
        return
    live.setting = replace(live.setting, steps={**live.setting.steps, **asked})
    live.graph = Graph.of(live.setting.steps, _turns(live.plans, live.options.order))
    drilled = [plan for plan in live.plans if plan.cell.drilled]
    live.pairs = pairs_of(drilled, tuple(asked.values()))
    live.options.report(_planned(asked))
    _write_replays(live, asked)


def _planned(asked: Mapping[str, Step]) -> Event:
    return Event(text=f"{len(asked)} launches follow from what ended", planned=tuple(asked))


def _start(live: _Live, launch: Launch, devices: tuple[str, ...]) -> local.Running:
    guard = prepare(live.setting, launch)
    launcher = _choice(live, launch) or Mode.TORCHRUN.value
    description = {
        **describe(live.setting, launch, launcher, devices),
        "guard": guard,
        "read_only": out_of_reach(live.setting, launch),
    }
    if launcher == Mode.TORCHRUN:
        return local.start_cold(description, live.run.observer_pack)
    refusal = live.warm.refusal(launch.environment, description)
    if refusal is None:
        return live.warm.start(launch.environment, description)
    if live.options.launcher is Mode.WARM:
        raise _ColdOnlyError(
            f"{launch.id} cannot run warm: {refusal}", hint="use --launcher auto or torchrun"
        )
    live.options.report(Event(text=f"{launch.id} runs cold: {refusal}"))
    return local.start_cold({**description, "launcher": "torchrun"}, live.run.observer_pack)


class _ColdOnlyError(UserError):
    """Ends the run: the user asked for warm launches only."""


def _collect(live: _Live, step_id: str) -> bool:
    """Record a launch if it has ended; whether it has."""
    running = live.running[step_id]
    if not running.poll():
        return False
    live.watch.look(live.running)
    if isinstance(live.graph.steps[step_id], Launch):
        live.watch.saved(live.setting, step_id)
        write_manifests(live.setting, live.setting.launch(step_id))
        _release_tier(live.setting, step_id)
        _clear_up(live, step_id)
    del live.running[step_id], live.devices[step_id]
    exit_file = running.folder / "exit.json"
    if not exit_file.exists():
        _finish(live, step_id, StepState.FAILED, "its cage left no exit.json")
        return True
    ended = read_json(exit_file)
    step = live.graph.steps[step_id]
    if isinstance(step, Convert):
        state = StepState.FAILED if cut_short(ended) else StepState.ENDED
        _finish(live, step_id, state, convert.close(live.setting, step))
        return True
    launch = live.setting.launch(step_id)
    badly = None if launch.fault else ended_badly(ended)  # a planned fault may end it any way
    no_room = _no_room(live, launch, badly)
    state = StepState.FAILED if no_room or cut_short(ended) else StepState.ENDED
    _finish(live, step_id, state, no_room or badly)
    if launch.role in (Role.SOURCE, Role.RESTORE):
        _expand(live)
    return True


def _no_room(live: _Live, launch: Launch, badly: str | None) -> str | None:
    """Why a launch is to run again once there is room; None when its record is whole."""
    ranks = live.run.launch(launch.id).glob("rank*.jsonl")
    if not badly and not any(b'"lost":' in last_bytes(path) for path in ranks):
        return None
    record_of_it = read_launch(live.run, launch.id, launch.topology.world_size)
    return lost_to_a_full_disk(launch, record_of_it, badly, _free_bytes(live.run.root))


def _free_bytes(folder: Path) -> int:
    """What this user may still write: root also what is kept back from all others."""
    there = os.statvfs(folder)
    return there.f_frsize * (there.f_bfree if os.geteuid() == 0 else there.f_bavail)


def _clear_up(live: _Live, launch_id: str) -> None:
    """Note what an interrupted launch left in `{out}`, and drop what nobody needs any more: there
    are many launches of this kind, each with a copy of its own.
    """
    launch = live.setting.launch(launch_id)
    if launch.fault is not None and launch.role is Role.INTERRUPTED:
        out = out_of(live.run, launch_id)
        write_json(live.run.launch(launch_id) / "left.json", interrupt.listing(out))
        interrupt.take(live.setting, launch, out)
    if launch.waits_for is not None and not live.options.keep:
        remove_tree(live.run.work(launch_id))


def _write_replays(live: _Live, asked: Mapping[str, Step]) -> None:
    """A script for each state, in the folder of its cell: `repro-POINT.sh`, by its first point."""
    for plan in live.plans:
        if plan.replay is None or plan.replay.id not in live.over:
            continue
        content = read_json(live.run.replay(plan.replay.id))
        in_place = resumes_in_place(live.setting)
        for name, launch_id in interrupt.scripts(plan, content, in_place=in_place).items():
            restore = asked[launch_id]
            if isinstance(restore, Launch):
                path = live.run.cell(plan.cell.id) / name
                write_atomic(path, repro_script(live.setting, replace(plan, restore=restore)))
                path.chmod(0o755)


def _finish(live: _Live, step_id: str, state: StepState, reason: str | None = None) -> None:
    record(live.run, step_id, state, reason)
    live.over[step_id] = Entry(state, reason)
    live.options.report(Event(step_id, state, reason or ""))


# --------------------------------------------------------------------------------------------------
# Cold and warm


def _compare_pairs(live: _Live) -> None:
    for pair in set(live.pairs.values()) - live.verdicts.keys():
        if pair.source_id in live.over and pair.repeat_id in live.over:
            why = _difference(live, pair)
            live.verdicts[pair] = why
            if why and live.options.launcher is Mode.AUTO:
                live.options.report(Event(text=f"{pair.environment} runs cold from here: {why}"))


def _difference(live: _Live, pair: Pair) -> str | None:
    for step_id in (pair.source_id, pair.repeat_id):
        reason = live.over[step_id].lost
        if reason is not None:
            return f"{step_id} {reason}"
    started = read_json(live.run.launch(pair.repeat_id) / "launch.json")
    if started["launcher"] != Mode.WARM:
        return f"{pair.repeat_id} did not run warm"
    ranks = live.setting.launch(pair.source_id).topology.world_size
    source, repeat = (read_launch(live.run, i, ranks) for i in (pair.source_id, pair.repeat_id))
    _, difference = equivalent(source, repeat)
    return difference and f"{pair.repeat_id} differs from {pair.source_id}: {difference}"


def _launchers(live: _Live) -> dict[str, str]:
    """For each environment, in words, how its launches were started and why."""
    words: dict[str, str] = {}
    for environment in {step.environment for step in _launches(live.graph.steps)}:
        if live.options.launcher is not Mode.AUTO:
            words[environment] = f"{live.options.launcher.value}: asked for"
            continue
        verdicts = [why for pair, why in live.verdicts.items() if pair.environment == environment]
        differing = [why for why in verdicts if why]
        if differing:
            words[environment] = f"torchrun: {live.warm.refusals.get(environment, differing[0])}"
        elif verdicts:
            words[environment] = "sources torchrun, then warm: both recorded the same facts"
        else:
            words[environment] = "torchrun: no source of this environment was repeated warm"
    return words


def _launches(steps: Mapping[str, Step]) -> Iterator[Launch]:
    return (step for step in steps.values() if isinstance(step, Launch))


# --------------------------------------------------------------------------------------------------
def _release_tier(setting: Setting, launch_id: str) -> None:
    """A memory tier that no later launch gets is memory to give back."""
    wanted = {each.tier.launch_id for each in _launches(setting.steps) if each.tier}
    if launch_id not in wanted:
        tiers.remove(setting.matrix.job.memory_tier, setting.run, launch_id)


# --------------------------------------------------------------------------------------------------
# End


def _closed(live: _Live) -> Outcome:
    tiers.remove(live.setting.matrix.job.memory_tier, live.run)
    outcome = Outcome(dict(live.over), live.watch.close(live.setting), _launchers(live))
    _note(
        live.run,
        status="ran",
        launchers=dict(outcome.launchers),
        source_unchanged=not outcome.source_changes,
        source_changes=list(outcome.source_changes),
        took_s=_took_s(live),
        clock_moved_s=_clock_moved_s(live),
    )
    for change in outcome.source_changes:
        live.options.report(Event(text=f"SOURCE CHANGED: {change}"))
    return outcome


def _stop(live: _Live) -> None:
    """End everything that runs, and note that it was interrupted."""

    def interrupted(step_id: str) -> None:
        with contextlib.suppress(UserError):  # a full disk is what we may be stopping for
            record(live.run, step_id, StepState.INTERRUPTED)
        live.options.report(Event(step_id, StepState.INTERRUPTED))

    _end_running(live, interrupted)
    live.warm.close()
    with contextlib.suppress(UserError):
        _note(live.run, took_s=_took_s(live))


def _end_running(live: _Live, over: Callable[[str], None]) -> None:
    """End all launches and wait until they have ended; what hangs is left to its cage."""
    for running in live.running.values():
        running.terminate()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while live.running and time.monotonic() < deadline:
        for step_id in [i for i, running in live.running.items() if _is_over(running)]:
            del live.running[step_id]
            over(step_id)
        time.sleep(_POLL_S)


def _clock_moved_s(live: _Live) -> float:
    """How far the wall clock was set, forward or back, while this process ran launches."""
    moved_s = (time.time() - live.began_s) - (time.monotonic() - live.began)
    return round(moved_s) if abs(moved_s) > _CLOCK_DRIFT_S else 0.0


def _took_s(live: _Live) -> float:
    """Seconds that launches were carried out, in all processes of this run."""
    took_s: float = _noted(live.run).get("took_s", 0.0)
    return took_s + time.monotonic() - live.began


def _is_over(running: local.Running) -> bool:
    """On a full disk the record of a launch cannot be written: it is over all the same."""
    try:
        return running.poll()
    except OSError:
        return True


def _interrupted(live: _Live) -> UserError:
    return UserError(
        f"interrupted: {len(live.over)} of {len(live.graph.steps)} steps are over",
        where=str(live.run.root),
        hint="continue with --resume: what has ended is not run again",
        code=ExitCode.UNPROVEN,
    )


@contextmanager
def _explained(run: RunFolder) -> Iterator[None]:
    """A disk that is full or may not be written is the user's to mend: what has been recorded
    stands, and the run goes on later.
    """
    try:
        yield
    except OSError as error:
        raise _cannot_go_on(run, error, error.strerror or str(error)) from error
    except UserError as error:
        cause = _full_disk(error)
        if cause is None:
            raise
        raise _cannot_go_on(run, cause, _first_line(error)) from error


def _cannot_go_on(run: RunFolder, error: OSError, why: str) -> UserError:
    full = _full_disk(error) is not None
    mend = "free some space" if full else "see that this can be read and written"
    began = error.errno in (errno.ENOSPC, errno.EDQUOT) or run.journal.exists()
    return UserError(
        f"cannot go on: {why}",
        where=str(error.filename or run.root),
        hint=f"{mend}, then continue with --resume",
        code=ExitCode.UNPROVEN if began else ExitCode.USAGE,
    )


def _full_disk(error: BaseException | None) -> OSError | None:
    """The system's error behind `error`, where it says that nothing more can be written."""
    cause = error.__cause__ if isinstance(error, UserError) else error
    return cause if isinstance(cause, OSError) and cause.errno in _DISK_FULL else None


def _raise_if_disk_full(error: UserError | OSError) -> None:
    """No later step can do better on a full disk, and no user who asked for warm wants cold."""
    if _full_disk(error) or isinstance(error, _ColdOnlyError):
        raise error


def _first_line(error: UserError | OSError) -> str:
    return str(error).partition("\n")[0]


def _noted(run: RunFolder) -> dict[str, Any]:
    content: dict[str, Any] = read_json(run.run_json) if run.run_json.exists() else {}
    return content


def _note(run: RunFolder, **fields: Any) -> None:
    write_json(run.run_json, {**_noted(run), **fields})


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C while the block runs (signals are the main thread's)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
