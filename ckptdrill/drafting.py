"""A first matrix for a script: what its text and a checkpoint tell, and comments on the rest.

The script is read, never run (`scripts`), and so is the checkpoint (`formats`). What is guessed
says so beside it; what only the owner knows says FILL IN. The file is a plain matrix: `plan` checks
it, and nothing else reads it differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptdrill import resources, scripts
from ckptdrill.errors import UserError
from ckptdrill.formats import stacks
from ckptdrill.formats.classify import classify
from ckptdrill.scripts import Argument, Script

_INTERVAL = 4
_FILL_IN = "FILL IN"
# Names of arguments by what they are for, the likeliest first; `-` is `_`.
_OUT = (
    r"out|out_?dir|output|output_?dir|output_path|out_path|save_?dir|save_path|save_folder",
    r"(ckpt|checkpoint)s?(_(save_)?(dir|path|folder|root))?|work_?dir|run_?dir|exp_?dir|log_?dir",
)
_RESUME = (
    r"resume|resume_from(_(checkpoint|ckpt|path|step))?|resume_(path|ckpt|checkpoint|dir)",
    r"restore(_from|_path|_dir)?|load(_(dir|path|from|checkpoint|ckpt))?|continue_from",
    r"(ckpt|checkpoint)(_path|_to_load)?|restart(_from)?|from_checkpoint",
)
_SAVE_AT = (r"save_(at|on|steps_list)|save_at_steps|checkpoint_at|save_inside",)
_SAVE_EVERY = (
    r"save_(every|interval|freq|frequency|period|steps|every_n_steps|iters)",
    r"(ckpt|checkpoint|checkpointing)_(every|interval|freq|frequency|steps|every_n_steps)",
)
_TOTAL = (r"(max|num|total|train|n)_(train_)?(steps|iters|iterations)|steps|iters|iterations",)
_MEMORY = (r"memory|memory_(dir|path|tier)|ram_?dir|fast_(dir|ckpt|checkpoint)s?|tier_dir",)
_MEMORY_EVERY = (r"(memory|ram|fast|tier)_(every|interval|freq|steps)",)
_DEGREES = {
    "dp_replicate": (r"dp_replicate|data_parallel_replicate_degree|ddp_size|replicas",),
    "dp_shard": (r"dp_shard|data_parallel_shard_degree|fsdp_size|shards",),
    "tp": (r"tp|tp_size|tp_degree|tensor_(model_)?parallel(_size|_degree)?",),
    "pp": (r"pp|pp_size|pp_degree|pipeline_(model_)?parallel(_size|_degree)?",),
    "cp": (r"cp|cp_size|cp_degree|context_parallel(_size|_degree)?",),
    "ep": (r"ep|ep_size|ep_degree|expert_(model_)?parallel(_size|_degree)?",),
    "zero_stage": (r"stage|zero_?stage|zero",),
}
_NUMBER = re.compile(r"(?<![\d.])(\d+)(?![\d.]*\d)")
_STEP_KEY = re.compile(r"(^|[./])(global_|completed_|current_)?(step|iteration|iter)s?$")


@dataclass(frozen=True)
class Found:
    """What a checkpoint tells: its place, the step, how many ranks wrote it, and its nature."""

    path: Path
    step: int | None
    ranks: int | None
    name: str | None  # as a template with {step}
    about: str


@dataclass(frozen=True)
class _Draft:
    """All that the file is made from."""

    script: Script
    program: str
    found: Found | None
    ranks_that_fit: int


def draft(program: Path, folder: Path, checkpoint: Path | None, ranks_that_fit: int) -> str:
    """The text of a matrix in `folder` for `program`, and for `checkpoint` where one is given.

    Raises UserError when the checkpoint cannot be read.
    """
    found = looked_at(checkpoint) if checkpoint else None
    given = _Draft(scripts.read(program), _named(program, folder), found, ranks_that_fit)
    return "\n".join(_lines(given)) + "\n"


def _named(program: Path, folder: Path) -> str:
    """The program as the matrix names it: shipped, below the file, or by its full path."""
    whole = program.resolve()
    if whole.parent == resources.jobs_dir().resolve():
        return f"{{jobs}}/{whole.name}"
    if whole.is_relative_to(folder.resolve()):
        return whole.relative_to(folder.resolve()).as_posix()
    return str(whole)


def looked_at(checkpoint: Path) -> Found:
    """What the files of a checkpoint tell. Nothing in them is executed.

    Raises UserError when it cannot be read.
    """
    read = stacks.read(checkpoint)
    ranks = {file.rank for file in read.files if file.rank is not None}
    steps = [
        int(leaf.text)
        for key, _, leaf in read.leaves
        if _STEP_KEY.search(key) and leaf.text.isdecimal() and int(leaf.text) > 0
    ]
    number = _NUMBER.search(read.path.name)
    step = int(number[1]) if number else next(iter(steps), None)
    name = _NUMBER.sub("{step}", read.path.name, count=1) if number else None
    if number and number[1].startswith("0"):
        name = read.path.name.replace(number[1], f"{{step:0{len(number[1])}d}}", 1)
    return Found(
        path=read.path.resolve(),
        step=step,
        ranks=max(ranks) + 1 if ranks else None,
        name=name,
        about=f"{read.form}, {classify(read).usable.value}",
    )


# --------------------------------------------------------------------------------------------------
# The file


def _lines(draft: _Draft) -> Iterator[str]:
    yield "# yaml-language-server: $schema=matrix.schema.json"
    yield "# A first matrix, made from the text of the script, which was not run. In its comments"
    yield "# `guess` may be wrong, and `FILL IN` is for you. Then: ckptdrill plan FILE"
    yield "version: 1"
    yield ""
    yield "job:"
    yield from (f"  {line}" for line in _job(draft))
    yield ""
    yield from _topologies(draft)
    yield ""
    yield from _policy()
    yield ""
    yield from _cells(draft)


def _job(draft: _Draft) -> Iterator[str]:
    yield f"program: {_text(draft.program)}"
    stack = _stack(draft.script)
    if stack:
        yield f"stack: {stack} # guess, from its imports; `ckptdrill claims` lists the others"
    yield from _arguments(draft)
    yield from _resume(draft)
    yield from _checkpoint(draft)
    yield from _steps(draft)
    yield "window: 5 # steps after the restore that are compared; let it reach into a later epoch"
    yield "timeout_s: 600 # FILL IN: longer than one launch takes, start-up included"
    yield from _start(draft)


def _arguments(draft: _Draft) -> Iterator[str]:
    """Each argument on a line of its own, with what it is."""
    rows = list(_given(draft))
    if not any("{out}" in value for _, value, _ in rows):
        yield "# FILL IN: how the script is told where to save; {out} is that folder."
        rows.insert(0, ("--out", "{out}", "guess: no argument looks like an output folder"))
    yield "args:"
    for flag, value, about in rows:
        words = ", ".join(_text(word) for word in (flag, value) if word)
        yield f"  # {about}"
        yield from (f"  - {word}" for word in words.split(", ")) if words else ()
    yield "  # Add what production adds; arguments that are left out keep their defaults."


def _given(draft: _Draft) -> Iterator[tuple[str, str, str]]:
    """(flag, value, comment) of every argument that a launch needs."""
    script, known = draft.script, set[str]()
    for argument, value, about in (*_roles(draft), *_degrees(script)):
        if argument is not None and argument.name not in known:
            known.add(argument.name)
            yield argument.flag, value, f"line {argument.line}: {about}"
    resume = script.first(*_RESUME)
    for argument in script.arguments:
        if argument.required and argument.name not in known and argument != resume:
            about = f": {' '.join(argument.about.split())}" if argument.about else ""
            yield argument.flag, _FILL_IN, f"line {argument.line}: FILL IN, required{about}"


def _roles(draft: _Draft) -> Iterator[tuple[Argument | None, str, str]]:
    script, saves = draft.script, _saves(draft)
    yield script.first(*_OUT), "{out}", "guess: where checkpoints go"
    at, every = script.first(*_SAVE_AT), script.first(*_SAVE_EVERY)
    if at is not None:
        yield at, ",".join(map(str, saves)), "guess: the steps to save, equal to `saves`"
    else:
        yield every, str(_INTERVAL), "guess: steps between two saves; `saves` are multiples of it"
    memory = script.first(*_MEMORY)
    if memory is not None:
        yield memory, "{memory_tier}", "guess: the folder of fast checkpoints in memory"
        yield script.first(*_MEMORY_EVERY), "2", "guess: steps between two saves in memory"


def _degrees(script: Script) -> Iterator[tuple[Argument | None, str, str]]:
    for name, patterns in _DEGREES.items():
        yield script.first(*patterns), f"{{{name}}}", "guess: a degree of the topology"


def _resume(draft: _Draft) -> Iterator[str]:
    argument = draft.script.first(*_RESUME)
    out = draft.script.first(*_OUT)
    if argument is None or argument == out:
        yield "# FILL IN: the arguments that restore a checkpoint, {resume} being its path. Without"
        yield "# {resume}, the job is taken to find the newest checkpoint below {out} itself."
        yield "resume_args: []"
        return
    value = [] if argument.switch else ["{resume}"]
    words = ", ".join(_text(word) for word in (argument.flag, *value) if word)
    told = (
        "turns resuming on; the job finds the checkpoint" if argument.switch else "the checkpoint"
    )
    yield f"resume_args: [{words}] # guess, line {argument.line}: {told}"


def _checkpoint(draft: _Draft) -> Iterator[str]:
    if draft.found and draft.found.name:
        name, origin = draft.found.name, "guess: named as the checkpoint that was given"
    elif draft.script.names:
        name, origin = draft.script.names[0], "guess: the script makes this name from a step"
    else:
        name, origin = "step-{step}", "FILL IN: where the checkpoint of a step appears"
    others = ", ".join(draft.script.names[1:4])
    yield f"checkpoint: {_text('{out}/' + name)} # {origin}"
    if others and not (draft.found and draft.found.name):
        yield f"# The script also makes: {others}"


def _steps(draft: _Draft) -> Iterator[str]:
    saves = _saves(draft)
    yield f"saves: {list(saves)} # steps that are saved, in the script's own numbering"
    yield f"restore_step: {saves[1]} # FILL IN: best a step in the second epoch"
    total = draft.script.first(*_TOTAL)
    last = saves[-1] + 2 * _INTERVAL
    if total is not None and total.default.isdecimal() and int(total.default) < last:
        flag = total.flag or total.name
        yield f"# FILL IN: {flag} is {total.default}; it must be {last} or more."
    memory = draft.script.first(*_MEMORY)
    if memory is not None:
        yield "memory_tier:"
        steps = [saves[1] - 2, saves[1] + 2]
        yield f"  saves: {steps} # guess: steps that are saved in memory only"


def _saves(draft: _Draft) -> tuple[int, int, int]:
    """Three saves, multiples of the interval, after the step that is started from."""
    start = (draft.found.step or 0) if draft.found else 0
    first = (start // _INTERVAL + 1) * _INTERVAL
    return first, first + _INTERVAL, first + 2 * _INTERVAL


def _start(draft: _Draft) -> Iterator[str]:
    found = draft.found
    if found is None:
        return
    yield f"# {found.about}; a private copy of it is what every source launch resumes."
    step = found.step
    if step is None or step < 1:
        yield "# FILL IN: its step, which neither its name nor its files tell. Take the # off then."
        yield f"# start_from: {_text(str(found.path))}"
        yield "# start_step: FILL IN"
        return
    yield f"start_from: {_text(str(found.path))}"
    yield f"start_step: {step} # guess, from its name or its files"


def _topologies(draft: _Draft) -> Iterator[str]:
    """The layout of the checkpoint or of two ranks, half of it and twice it, as far as they fit."""
    found, limit = draft.found, draft.ranks_that_fit
    known = found.ranks if found else None
    base = max(1, min(known or 2, limit))
    axis = _axis(draft.script)
    stage = draft.script.first(*_DEGREES["zero_stage"])
    more = f", zero_stage: {_stage(stage)}" if stage else ""
    origin = "guess, from its files" if known else "FILL IN: the ranks and degrees of production"
    yield "topologies:"
    yield f"  now: {{{axis}: {base}{more}}} # {origin}"
    if known and known > limit:
        yield f"  # Its {known} ranks do not fit this node: drill it where they do."
    if base > 1:
        yield f"  smaller: {{{axis}: {max(1, base // 2)}{more}}}"
    if 2 * base <= limit:
        yield f"  larger: {{{axis}: {2 * base}{more}}}"


def _stage(argument: Argument) -> str:
    return argument.default if argument.default in ("0", "1", "2", "3") else "1"


def _axis(script: Script) -> str:
    sharded = script.words & {"fully_shard", "FullyShardedDataParallel", "FSDP"}
    return "dp_shard" if sharded or script.first(*_DEGREES["dp_shard"]) else "dp"


def _policy() -> Iterator[str]:
    yield "policy:"
    yield "  # FILL IN: what you promise of random state; `continued` is the strictest."
    yield "  rng: {same_world_size: continued, other_world_size: not_guaranteed}"
    yield "  # An item that need not hold is declared with your reason: out_of_scope: {rng: why}"


def _cells(draft: _Draft) -> Iterator[str]:
    """The baseline alone first: without it, no other cell can be judged."""
    base = max(1, min((draft.found.ranks if draft.found else None) or 2, draft.ranks_that_fit))
    names = ["now", *(["smaller"] if base > 1 else [])]
    names += ["larger"] if 2 * base <= draft.ranks_that_fit else []
    yield "matrix:"
    yield "  # Begin with `targets: [now]`: without a baseline that holds, nothing else is judged."
    yield f"  - {{source: now, targets: [{', '.join(names)}]}}"
    yield "  # Faults come next; `ckptdrill list` explains each:"
    yield "  # - {source: now, target: now, drill: {corrupt-shard: {kind: [bit-flip, truncate]}}}"


# Imports of a stack, the first that fits; those of a framework come before those of torch.
_STACKS: Sequence[tuple[str, frozenset[str]]] = (
    ("deepspeed-native", frozenset({"deepspeed"})),
    ("torchtitan", frozenset({"torchtitan"})),
    ("lightning", frozenset({"lightning", "pytorch_lightning"})),
    ("hf-trainer", frozenset({"transformers", "Trainer"})),
    ("accelerate", frozenset({"accelerate", "Accelerator"})),
    ("dcp-fsdp2", frozenset({"checkpoint", "fully_shard"})),
    ("dcp-fsdp1", frozenset({"checkpoint", "FullyShardedDataParallel"})),
    ("dcp-ddp", frozenset({"checkpoint", "DistributedDataParallel"})),
)
_ALTERNATIVES = ("lightning", "deepspeed-native", "torchtitan")


def _stack(script: Script) -> str | None:
    for name, words in _STACKS:
        fits = words & script.words if name in _ALTERNATIVES else words <= script.words
        if fits and (not name.startswith("dcp-") or {"distributed", "dcp"} & script.words):
            return name
    return None


def _text(value: str) -> str:
    """As YAML: plain where that is safe, else in double quotes."""
    plain = re.fullmatch(r"[A-Za-z_./-][A-Za-z0-9_./+-]*", value)
    words = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "~", "-", "."}
    return value if plain and value.lower() not in words else json.dumps(value)


def write(path: Path, text: str) -> None:
    """Write a new file, whole or not at all.

    Raises UserError when there is something at `path` already, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise UserError(
            f"{path} exists already; nothing was written",
            hint="move it away, or name another file with --output",
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
