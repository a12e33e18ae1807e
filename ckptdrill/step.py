"""One step of a plan: the folders it needs, the description of its launch, the record it leaves.

A launch gets its own `{out}` and, when it restores, a private copy of the checkpoint; its
description (`launch.json`) holds everything the job's side needs to know, in steps counted from the
start of that process. Nothing here waits for a process: `run` starts what is described here and
comes back when it has ended. What a damage does is in `inflict`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptdrill import placeholders, pointers, tiers
from ckptdrill.isolate import private_copy
from ckptdrill.launch.local import job_environment
from ckptdrill.matrix import Matrix
from ckptdrill.model import (
    Checkpoint,
    Convert,
    Damage,
    Job,
    Launch,
    LaunchRecord,
    PointerLie,
    Replay,
    Role,
    Step,
    Topology,
    to_json,
)
from ckptdrill.placeholders import fill, placeholder_values, saved_to, used
from ckptdrill.store import RunFolder, read_json, write_json

# How long the ranks of a launch wait for each other when they agree where to end.
_AGREE_TIMEOUT_S = 60.0
# What says that a write found no room, also where torch has swallowed the system's own words.
_NO_ROOM = re.compile(
    r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing"
    r"|unexpected pos \d+ vs"
)
# Less than what a launch itself leaves.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class Setting:
    """What every step is done with: the matrix, the run folder, and all planned steps by id."""

    matrix: Matrix
    run: RunFolder
    steps: Mapping[str, Step]

    def launch(self, launch_id: str) -> Launch:
        """The launch of that id."""
        step = self.steps[launch_id]
        if not isinstance(step, Launch):
            raise TypeError(f"step {launch_id} is not a launch")
        return step


# --------------------------------------------------------------------------------------------------
# Where things are


def out_of(run: RunFolder, launch_id: str) -> Path:
    """`{out}` of a launch: where the job writes its checkpoints."""
    return run.work(launch_id) / "out"


def checkpoint_path(setting: Setting, checkpoint: Checkpoint) -> Path:
    """Where a launch saves a step, or where the damaged private copy of it is."""
    launch = setting.launch(checkpoint.launch_id)
    out = out_of(setting.run, launch.id)
    path = saved_at(setting, launch.topology, out, checkpoint.step, checkpoint.template)
    if checkpoint.state is not None:
        state = setting.run.work(checkpoint.damage_id or "") / "states" / checkpoint.state
        return state if resumes_in_place(setting) else state / path.relative_to(out)
    if checkpoint.conversion_id is not None:
        return converted_path(setting, checkpoint)
    if checkpoint.damage_id is not None:
        out = setting.run.work(checkpoint.damage_id)
        return saved_at(setting, launch.topology, out, checkpoint.step, checkpoint.template)
    kept = kept_path(setting, launch.id, checkpoint.step, path)
    names_its_step = "step" in used(checkpoint.template or setting.matrix.job.checkpoint)
    gone = not names_its_step or not path.exists()
    return kept if gone and kept.exists() else path


def kept_path(setting: Setting, launch_id: str, step: int, path: Path) -> Path:
    """Where the observer keeps what lay at `path` when `step` had been saved there."""
    out = out_of(setting.run, launch_id)
    below = path.relative_to(out) if path.is_relative_to(out) else Path(path.name)
    return kept_folder(setting, launch_id) / str(step) / below


def kept_folder(setting: Setting, launch_id: str) -> Path:
    """Checkpoints of a launch as they were when they had been written, by step."""
    return setting.run.work(launch_id) / "saves"


def converted_path(setting: Setting, checkpoint: Checkpoint) -> Path:
    """Where a conversion puts its result: beside a copy of what it converts, as `step-8_NAME`."""
    step = setting.steps[checkpoint.conversion_id or ""]
    if not isinstance(step, Convert):
        raise TypeError(f"step {step.id} is not a conversion")
    source = checkpoint_path(setting, step.checkpoint)
    return setting.run.work(step.id) / f"{source.name}_{step.name}"


def restored(setting: Setting, launch: Launch) -> Checkpoint | None:
    """What a launch restores: as planned, or what a guard has selected in its place."""
    planned = launch.restores
    if planned is None or planned.damage_id is None:
        return planned
    step = _selected(setting.run.damage(planned.damage_id))
    return planned if step is None else replace(planned, step=step)


def _selected(record: Path) -> int | None:
    """The step that the guard of a damaged copy chose; None before the damage, and without one."""
    step: int | None = read_json(record).get("selected_step") if record.exists() else None
    return step


def restored_path(setting: Setting, launch: Launch) -> Path | None:
    """The checkpoint whose private copy `launch` restores; None when it trains from scratch."""
    checkpoint = restored(setting, launch)
    if checkpoint is not None:
        return checkpoint_path(setting, checkpoint)
    start_from = setting.matrix.job.start_from
    return Path(start_from) if start_from is not None else None


def first_step(setting: Setting, launch: Launch) -> int:
    """The job's step at which the process of `launch` begins; its own count begins at 0 there."""
    checkpoint = restored(setting, launch)
    return checkpoint.step if checkpoint else setting.matrix.job.start_step


def tier_of(setting: Setting, launch: Launch) -> Path | None:
    """`{memory_tier}` of a launch; None where the job has none."""
    declared = setting.matrix.job.memory_tier
    return None if declared is None else tiers.folder(declared, setting.run, launch.id)


def resumes_in_place(setting: Setting) -> bool:
    """True when the job is never told a path: it finds the newest checkpoint in `{out}` itself."""
    return placeholders.resumes_in_place(setting.matrix.job)


def copy_target(setting: Setting, launch: Launch, source: Path) -> Path:
    """Where the private copy of `source` goes: under its name, or where the job looks for it."""
    if resumes_in_place(setting):
        out = out_of(setting.run, launch.id)
        whole = launch.restores is not None and (
            launch.restores.template == "{out}" or launch.restores.state is not None
        )
        if whole:
            return out  # all that a run has left, or a state: the job chooses
        return saved_at(setting, launch.topology, out, first_step(setting, launch))
    checkpoint = restored(setting, launch)
    as_saved = checkpoint is not None and not (checkpoint.state or checkpoint.conversion_id)
    below = _below_out(setting, checkpoint) if checkpoint and as_saved else Path(source.name)
    return setting.run.work(launch.id) / "restore" / below


def _below_out(setting: Setting, checkpoint: Checkpoint) -> Path:
    """Where a checkpoint lies in the `{out}` of the run that saved it: in a copy it lies there,
    too, so that a job finds what it reads beside it.
    """
    saver = setting.launch(checkpoint.launch_id)
    out = out_of(setting.run, saver.id)
    path = saved_at(setting, saver.topology, out, checkpoint.step, checkpoint.template)
    inside = path.is_relative_to(out) and path != out
    return path.relative_to(out) if inside else Path(path.name)


def beside(setting: Setting, launch: Launch) -> Iterator[tuple[Path, Path]]:
    """(source, target) of what lies beside a damaged copy, as it would in production: the
    generation before, which a job may fall back to, and a newer one whose save never finished.
    """
    planned, given = launch.restores, restored(setting, launch)
    if planned is None or planned.damage_id is None or planned.state is not None or given is None:
        return
    own = copy_target(setting, launch, checkpoint_path(setting, given))
    for each in (*older(setting, given), *torn(setting, planned.damage_id)):
        source = checkpoint_path(setting, each)
        place = _beside(setting, launch, each)
        if source.exists() and place != own:
            yield source, place


def _beside(setting: Setting, launch: Launch, other: Checkpoint) -> Path:
    if resumes_in_place(setting):
        return saved_at(setting, launch.topology, out_of(setting.run, launch.id), other.step)
    return setting.run.work(launch.id) / "restore" / _below_out(setting, other)


def older(setting: Setting, checkpoint: Checkpoint) -> tuple[Checkpoint, ...]:
    """The undamaged save of the same launch before that of `checkpoint`, if there is one."""
    steps = [step for step in setting.matrix.job.saves if step < checkpoint.step]
    return tuple(Checkpoint(checkpoint.launch_id, step) for step in sorted(steps)[-1:])


def torn(setting: Setting, damage_id: str) -> tuple[Checkpoint, ...]:
    """The step that a lying pointer names although its save never finished, if that is the lie."""
    damage = setting.steps[damage_id]
    if not isinstance(damage, Damage) or damage.parameters.get("lie") != PointerLie.UNCOMMITTED:
        return ()
    step = int(damage.parameters["named_step"])
    return (Checkpoint(damage.checkpoint.launch_id, step, damage_id),)


def overlaid(setting: Setting, launch: Launch) -> tuple[Path, Path] | None:
    """The older checkpoint that lies where `launch` will save its last step, and where that is.

    None where nothing lies there before the launch: it is not asked for, or the job overwrites its
    own older save anyway, because all its steps are saved at one path.
    """
    if launch.over is None or "step" not in used(setting.matrix.job.checkpoint):
        return None
    out = out_of(setting.run, launch.id)
    target = saved_at(setting, launch.topology, out, launch.stop_step)
    return checkpoint_path(setting, launch.over), target


def saved_at(
    setting: Setting, topology: Topology, out: Path, step: int, template: str | None = None
) -> Path:
    """Where a job whose `{out}` is `out` saves a step."""
    values = placeholder_values(topology, out=out, resume=None, step=step)
    return Path(fill(template or setting.matrix.job.checkpoint, values, "job.checkpoint"))


# --------------------------------------------------------------------------------------------------
# A launch

# From equal state the first gradient is the same everywhere; some mistakes show at a later one.
GRADIENT_STEPS = 3


def describe(
    setting: Setting, launch: Launch, launcher: str, devices: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The content of `launch.json`: steps are counted from the start of the process.

    `first_step` is the job's step at that moment; `devices` become CUDA_VISIBLE_DEVICES.
    """
    job, run = setting.matrix.job, setting.run
    filled = _filler(setting, launch)
    resumes = restored_path(setting, launch) is not None
    resume_args = resume_args_of(setting, launch) if resumes else ()
    args = (*job.args, *launch.topology.args, *resume_args)
    args = (*args, *launch.extra_args)
    offset = first_step(setting, launch)
    environment = setting.matrix.environments[launch.environment]
    job_env = {name: filled(text, f"job.env.{name}") for name, text in job.env.items()}
    folder = run.launch(launch.id)
    return {
        "id": launch.id,
        "folder": str(folder),
        "out": str(out_of(run, launch.id)),
        "program": job.program,
        "module": job.module,
        "args": [filled(text, "job.args") for text in args],
        "cwd": job.cwd,
        "python": environment.python,
        "world_size": launch.topology.world_size,
        "env": job_environment(
            os.environ,
            {**job_env, "CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else job_env,
            run.observer_pack,
            folder / "launch.json",
        ),
        "first_step": offset,
        "stop_step": launch.stop_step - offset,
        "sample_steps": [step - offset for step in _sampled(setting, launch, offset)],
        "gradient_steps": _of_gradients(setting, launch, offset),
        "quiet": launch.quiet,
        "other_stream_step": None
        if launch.other_stream_from is None
        else launch.other_stream_from - offset,
        "movable_steps": [step - offset for step in _movable(setting, launch, offset)],
        "timeout_s": job.timeout_s,
        "agree_timeout_s": min(_AGREE_TIMEOUT_S, job.timeout_s / 2),
        "launcher": launcher,
        "hostname": launch.host,
        "fault": to_json(launch.fault),
        "file_events": _file_events(setting, launch, offset),
        "keep": _to_keep(setting, launch),
        "window": _window(setting, launch),
    }


def resume_args_of(setting: Setting, launch: Launch) -> tuple[str, ...]:
    """What a launch that restores is told beside the job's arguments, as templates."""
    step = setting.steps.get((launch.restores and launch.restores.conversion_id) or "")
    if isinstance(step, Convert):
        own = setting.matrix.conversions[step.name].resume_args
        if own is not None:
            return own
    return setting.matrix.job.resume_args


def _window(setting: Setting, launch: Launch) -> dict[str, Any] | None:
    """How a run from the start tells the save under drill, whatever the job's numbers mean; see
    observer/window.py. None where its path does not name the step, and for a run that is to end
    before that window does.
    """
    job, out = setting.matrix.job, out_of(setting.run, launch.id)
    uninterrupted = launch.role in (Role.SOURCE, Role.REPEAT, Role.CONTROL) and not launch.fault
    ends_sooner = launch.stop_step < job.end_step  # up to a failure, say
    if launch.restores or not uninterrupted or ends_sooner:
        return None
    if "step" not in used(job.checkpoint):
        return None
    paths = {step: saved_at(setting, launch.topology, out, step) for step in job.saves}
    if not all(path.is_relative_to(out) for path in paths.values()):
        return None
    own = {step: saved_to(path.relative_to(out).as_posix()) for step, path in paths.items()}
    return {"wanted": own[job.restore_step], "own": "|".join(own.values()), "steps": job.window}


def _to_keep(setting: Setting, launch: Launch) -> dict[str, Any] | None:
    """The checkpoints of a launch that other steps restore; see observer/kept.py."""
    job, out = setting.matrix.job, out_of(setting.run, launch.id)
    steps = {c.step for c in restored_checkpoints(setting) if c.launch_id == launch.id}
    paths = [
        [step, str(path), "step" in used(template)]
        for step in sorted(steps)
        for template in (job.checkpoint, *job.beside)
        if (path := saved_at(setting, launch.topology, out, step, template)).is_relative_to(out)
    ]
    if not paths or launch.role is Role.INTERRUPTED:
        return None
    return {"root": str(out), "into": str(kept_folder(setting, launch.id)), "paths": paths}


def _file_events(setting: Setting, launch: Launch, offset: int) -> dict[str, Any] | None:
    """What the observer of a launch needs that records its save file by file."""
    if launch.role is not Role.INTERRUPTED:
        return None
    return {
        "root": str(out_of(setting.run, launch.id)),
        "kept": str(setting.run.work(launch.id) / "kept"),
        "step": launch.stop_step - offset,
    }


def prepare(setting: Setting, launch: Launch) -> str | None:
    """Make the folders of a launch and its private copy; the guard level of the copy, if any.

    Raises UserError or OSError when the copy cannot be made.
    """
    out = out_of(setting.run, launch.id)
    _prepare_tier(setting, launch)
    source = restored_path(setting, launch)
    if source is None:
        out.mkdir(parents=True, exist_ok=True)
        placed = overlaid(setting, launch)
        return None if placed is None else str(private_copy(*placed))
    target = copy_target(setting, launch, source)
    (target.parent if target == out else out).mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    # A damage may have removed a checkpoint of one file: the job is given the path all the same.
    guard = private_copy(source, target) if source.exists() else None
    for other, place in (*beside(setting, launch), *_read_with(setting, launch)):
        if not place.exists():
            private_copy(other, place)
    checkpoint = restored(setting, launch)
    if checkpoint is not None and resumes_in_place(setting) and target != out:
        _give_pointers(setting, launch, checkpoint)
    return None if guard is None else str(guard)


def _read_with(setting: Setting, launch: Launch) -> Iterator[tuple[Path, Path]]:
    """(source, target) of what a job reads with the checkpoint (`job.checkpoint` as a list): it
    lies in the copy as it lies in the `{out}` of the run that saved it.
    """
    given = restored(setting, launch)
    if given is None or given.state is not None or given.conversion_id is not None:
        return
    here = out_of(setting.run, launch.id)
    copy = here if resumes_in_place(setting) else setting.run.work(launch.id) / "restore"
    for template in setting.matrix.job.beside:
        undamaged = replace(given, damage_id=None, template=template)
        source = checkpoint_path(setting, undamaged)
        if source.exists():
            yield source, copy / _below_out(setting, undamaged)


def out_of_reach(setting: Setting, launch: Launch | Convert) -> list[str]:
    """What `launch` has no business to write to, there yet or not: the checkpoint that the run
    starts from, and the folders of other launches and conversions whose checkpoints are restored.

    Its own folder is not separated from the rest: a job may rename files into `{out}`.
    """
    start_from = setting.matrix.job.start_from
    given = [] if start_from is None else [Path(start_from).resolve()]
    savers = {used.launch_id for used in restored_checkpoints(setting)}
    savers |= {step.id for step in setting.steps.values() if isinstance(step, Convert)}
    savers -= {launch.id}
    return [str(path) for path in (*given, *(setting.run.work(each) for each in sorted(savers)))]


def restored_checkpoints(setting: Setting) -> Iterator[Checkpoint]:
    """The checkpoints, undamaged ones, that the steps of the run restore or copy."""
    for step in setting.steps.values():
        yield from _uses(setting, step)


def _uses(setting: Setting, step: Step) -> tuple[Checkpoint, ...]:
    if isinstance(step, Replay):
        return ()
    if isinstance(step, Damage):
        later = (replace(each, damage_id=None) for each in torn(setting, step.id))
        return (step.checkpoint, *older(setting, step.checkpoint), *later)
    if isinstance(step, Convert):
        return (step.checkpoint,)
    if step.restores is None or step.restores.damage_id or step.restores.conversion_id:
        return ()
    return (step.restores,)


def _prepare_tier(setting: Setting, launch: Launch) -> None:
    declared = setting.matrix.job.memory_tier
    if declared is not None:
        record = tiers.give(declared, setting.run, launch.id, launch.tier)
        if record:
            write_json(setting.run.tier(launch.id), record)


def unmet(setting: Setting, step: Step) -> str | None:
    """Why a step whose dependencies ended well still cannot run: nothing was saved for it."""
    if isinstance(step, Replay):
        return None
    if isinstance(step, (Damage, Convert)):
        path: Path | None = checkpoint_path(setting, step.checkpoint)
    else:
        path = restored_path(setting, step)
        damage_id = step.restores.damage_id if step.restores else None
        if damage_id is not None and setting.run.damage(damage_id).exists():
            refused = read_json(setting.run.damage(damage_id)).get("guard_refused")
            return "the guard refused it, and no older checkpoint is whole" if refused else None
    if path is None or path.exists():
        return None
    there = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
    held = f"the folder holds {', '.join(there[:5])}" if there else "the folder is empty"
    return f"there is no checkpoint at {path}; {held}"


def ended_badly(exit_record: Mapping[str, Any]) -> str | None:
    """Why a launch did not end well, from its `exit.json`; None when it did.

    A launcher that lingered after every rank had finished is a teardown that hung: the training is
    done and its facts are on disk.
    """
    if str(exit_record.get("error")).startswith("lingered"):
        return None
    if exit_record.get("error"):
        return f"could not be run: {exit_record['error']}"
    if exit_record.get("timed_out"):
        return f"exceeded its time limit after {exit_record.get('wall_s', 0.0):.0f} s"
    if exit_record.get("signal"):
        return f"was ended by {_signal_name(int(exit_record['signal']))}"
    if exit_record.get("returncode"):
        return f"ended with exit code {exit_record['returncode']}"
    return None


def cut_short(exit_record: Mapping[str, Any]) -> bool:
    """The cage was ended, or failed: whatever the job left says nothing about the job."""
    return str(exit_record.get("error")).startswith(("cage ", "terminated"))


def lost_to_a_full_disk(
    launch: Launch, record: LaunchRecord, badly: str | None, free_bytes: int
) -> str | None:
    """Why what a launch left is no evidence: the disk was full while it ran, and no fault of the
    plan filled it. `badly` is what `ended_badly` says.
    """
    if launch.fault is not None:
        return None
    if any("lost" in fact.data for fact in record.facts):
        return "the disk was full while it ran: facts were lost"
    messages = (each["message"] for fact in record.of("crashed") for each in fact.data["error"])
    said = next(filter(_NO_ROOM.search, messages), None)
    if badly and (said or free_bytes < _SPARE_BYTES):
        why = said.strip().partition("\n")[0][:300] if said else f"it {badly}"
        return f"the disk was full while it ran: {why}"
    return None


def _filler(setting: Setting, launch: Launch) -> Callable[[str, str], str]:
    source = restored_path(setting, launch)
    values = placeholder_values(
        launch.topology,
        out=out_of(setting.run, launch.id),
        resume=None if source is None else copy_target(setting, launch, source),
        step=first_step(setting, launch),
        memory_tier=tier_of(setting, launch),
    )
    return lambda text, where: fill(text, values, where)


def _sampled(setting: Setting, launch: Launch, offset: int) -> list[int]:
    """Steps, in the job's count, at which the state is recorded: the saves and the whole window.

    Of the window of a restore the ends and the first update are enough: every sample takes a pass
    over all of the state, and what other steps are compared by (loss, LR, rows) is in none.
    """
    job = setting.matrix.job
    begin = offset if launch.restores else job.restore_step
    window = range(begin, begin + job.window + 1)
    wanted = {*job.saves, job.restore_step, *(window[:: job.window] if launch.restores else window)}
    wanted |= {begin + 1} | _tier_saves(job)
    # Any save may be restored: its first update, too.
    wanted |= {step + 1 for step in wanted & {*job.saves, *_tier_saves(job)}}
    return sorted(step for step in wanted if offset <= step <= launch.stop_step)


def _of_gradients(setting: Setting, launch: Launch, offset: int) -> list[int]:
    """Completed steps, from the start of the process, of which the next gradient is recorded: the
    first ones of the process, and the first after whatever may be restored.
    """
    job = setting.matrix.job
    begins = {offset, *job.saves, job.restore_step, *_tier_saves(job)}
    steps = {step + n for step in begins for n in range(GRADIENT_STEPS)}
    return sorted(step - offset for step in steps if offset <= step < launch.stop_step)


def _movable(setting: Setting, launch: Launch, offset: int) -> list[int]:
    """Steps at which digests are recorded that the judge can move (observer/movable.py): the
    restore and the save after it, in runs that have more ranks than one somewhere.
    """
    launches = (step for step in setting.steps.values() if isinstance(step, Launch))
    if not any(each.topology.world_size > 1 for each in launches):
        return []
    begin = offset if launch.restores else setting.matrix.job.restore_step
    later = sorted(step for step in setting.matrix.job.saves if step > begin)
    # Two runs that begin alike are told from the weights that they begin with.
    start = () if launch.restores else (offset,)
    return sorted({s for s in (*start, begin, *later[:1]) if offset <= s <= launch.stop_step})


def _tier_saves(job: Job) -> set[int]:
    return set(job.memory_tier.saves) if job.memory_tier else set()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _give_pointers(setting: Setting, launch: Launch, checkpoint: Checkpoint) -> None:
    """Copy `latest` and its like into `{out}`, as they were when `checkpoint` was the newest, or
    as a damage has made them lie.

    A job that finds its own checkpoint follows them; the source run has gone on since and moved
    them to a step that is not here.
    """
    source_out, out = out_of(setting.run, checkpoint.launch_id), out_of(setting.run, launch.id)
    kept = pointers_of(setting, launch)
    lying = lying_pointers(setting, checkpoint.damage_id) if checkpoint.damage_id else None
    if lying is not None and lying.exists():
        pointers.copy(lying, kept, _pointer_folders(setting, checkpoint), {}, (source_out, out))
    else:
        set_pointers(setting, checkpoint, kept, out)
    shutil.copytree(kept, out, symlinks=True, dirs_exist_ok=True)


def set_pointers(setting: Setting, checkpoint: Checkpoint, kept: Path, out: Path) -> None:
    """Copy the pointers of a source to `kept`, each set to the step of `checkpoint` in `out`."""
    texts = {
        text: told
        for step in setting.matrix.job.saves
        for text, told in renamed(setting, checkpoint, step, checkpoint.step).items()
    }
    source_out = out_of(setting.run, checkpoint.launch_id)
    folders = _pointer_folders(setting, checkpoint)
    pointers.copy(source_out, kept, folders, texts, (source_out, out))


def pointers_of(setting: Setting, launch: Launch) -> Path:
    """Where the pointers are kept as they were given to the job, for a replay."""
    return setting.run.work(launch.id) / "pointers"


def lying_pointers(setting: Setting, damage_id: str) -> Path:
    """Where a damage of the pointers keeps them as they lie."""
    return setting.run.work(damage_id) / "pointers"


def _pointer_folders(setting: Setting, checkpoint: Checkpoint) -> list[str]:
    """Where a pointer may lie, relative to `{out}`: there, and beside the checkpoint."""
    out = out_of(setting.run, checkpoint.launch_id)
    path = checkpoint_path(setting, replace(checkpoint, damage_id=None))
    beside_it = path.parent.relative_to(out).as_posix() if path.is_relative_to(out) else "."
    return sorted({".", beside_it})


def renamed(setting: Setting, checkpoint: Checkpoint, step: int, other: int) -> dict[str, str]:
    """How a pointer may name `step` of a launch, and how it then names the step `other`."""
    source = setting.launch(checkpoint.launch_id)
    texts = (_pointer_texts(setting, source, number) for number in (step, other))
    return dict(zip(*texts, strict=True))


def _pointer_texts(setting: Setting, launch: Launch, step: int) -> tuple[str, ...]:
    """How a pointer may name a saved step: its folder, the path of it from `{out}`, from beside
    it, in full, the number.
    """
    out = out_of(setting.run, launch.id)
    path = saved_at(setting, launch.topology, out, step)
    relative = path.relative_to(out).as_posix() if path.is_relative_to(out) else path.name
    return (path.name, relative, str(path), str(step))
