"""Convert a saved checkpoint before it is restored, once for all cells that restore the result.

In order: see that there is room for what the command will write, measured from the size of the
source; give it a private copy; run it in a cage like any launch, with a time limit and with all
that belongs to others read-only; then look at what it left, without executing any of it, and write
the record. A command that ended well and left half a checkpoint has not converted anything.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptdrill.errors import UserError
from ckptdrill.formats import stacks, universal
from ckptdrill.isolate import private_copy
from ckptdrill.journal import remove_tree
from ckptdrill.launch import local
from ckptdrill.model import Conversion, Convert
from ckptdrill.placeholders import fill, placeholder_values
from ckptdrill.step import Setting, checkpoint_path, converted_path, ended_badly, out_of_reach
from ckptdrill.store import last_bytes, read_json, tree_files, write_json

POINTER = "latest_universal"
_SHOWN = 5
_MESSAGE_BYTES = 400
# What says that the converter itself never ran, which is no word of the stack on the checkpoint.
_NOT_THERE = re.compile(
    r"No module named|ModuleNotFoundError|ImportError|No such file or directory"
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)?: ?\S")


def start(setting: Setting, step: Convert) -> local.Running:
    """Start the command of `step` in a cage.

    Raises UserError when there is too little space, when the source cannot be copied, or when the
    working directory of the job does not exist; OSError when nothing can be written.
    """
    declared = setting.matrix.conversions[step.name]
    source = checkpoint_path(setting, step.checkpoint)
    work = setting.run.work(step.id)
    work.mkdir(parents=True, exist_ok=True)
    _require_room(source, work, declared.space_factor)
    guard = private_copy(source, work / source.name)
    description = {**_description(setting, step, declared), "guard": str(guard)}
    return local.start_cold(description, setting.run.observer_pack)


def close(setting: Setting, step: Convert) -> str | None:
    """Write the record of a conversion that has ended; why nothing can be restored from it, if so.

    The private copy is removed: nobody reads it again.
    """
    folder = setting.run.launch(step.id)
    ended, launch = read_json(folder / "exit.json"), read_json(folder / "launch.json")
    converted = _place(setting, step)
    badly = ended_badly(ended)
    looked = {} if badly else _looked_at(converted)
    record = {
        "id": step.id,
        "name": step.name,
        "command": launch["command"],
        "took_s": ended["wall_s"],
        "source_bytes": launch["source_bytes"],
        "converted_bytes": _size_bytes(converted) if converted.exists() else 0,
        "ended_badly": badly,
        "timed_out": bool(ended.get("timed_out")),
        "refused": bool(ended.get("returncode")) and not _absent(folder),
        "message": _message(folder) if badly else None,
        "form": looked.get("form"),
        "problems": looked.get("problems", [])[:_SHOWN],
        "problem_count": len(looked.get("problems", [])),
    }
    write_json(setting.run.conversion(step.id), record)
    remove_tree(setting.run.work(step.id) / checkpoint_path(setting, step.checkpoint).name)
    problems: list[str] = record["problems"]
    return badly or next((f"left no whole checkpoint: {each}" for each in problems), None)


def _place(setting: Setting, step: Convert) -> Path:
    return converted_path(setting, replace(step.checkpoint, conversion_id=step.id))


def _description(setting: Setting, step: Convert, declared: Conversion) -> dict[str, Any]:
    """The content of `launch.json`: a command in place of ranks."""
    job, folder = setting.matrix.job, setting.run.launch(step.id)
    source = checkpoint_path(setting, step.checkpoint)
    copy = setting.run.work(step.id) / source.name
    at = placeholder_values(step.topology, out=copy.parent, resume=None, step=step.checkpoint.step)
    told = {
        **{name: value for name, value in at.items() if name not in ("out", "resume")},
        "python": setting.matrix.environments[step.environment].python,
        "source_checkpoint": copy,
        "converted": _place(setting, step),
    }
    where = f"conversions.{step.name}.command"
    env = {name: fill(text, at, f"job.env.{name}") for name, text in job.env.items()}
    return {
        "id": step.id,
        "folder": str(folder),
        "command": [fill(text, told, where) for text in declared.command],
        "cwd": job.cwd,
        "world_size": 0,
        "env": local.job_environment(
            os.environ, env, setting.run.observer_pack, folder / "launch.json"
        ),
        "timeout_s": declared.timeout_s,
        "read_only": out_of_reach(setting, step),
        "source_bytes": _size_bytes(source),
    }


# --------------------------------------------------------------------------------------------------
# Room


def _require_room(source: Path, work: Path, factor: float) -> None:
    """Raise UserError when less is free than `factor` times the size of the source."""
    size_bytes = _size_bytes(source)
    free_bytes = shutil.disk_usage(work).free
    needed_bytes = int(size_bytes * factor)
    if free_bytes < needed_bytes:
        raise UserError(
            f"a conversion of {size_bytes:,} bytes needs {needed_bytes:,} bytes, "
            f"{free_bytes:,} are free",
            where=str(work),
            hint="free some space, choose another --runs folder, or lower space_factor",
        )


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in tree_files(path))


# --------------------------------------------------------------------------------------------------
# What it left


def _looked_at(converted: Path) -> dict[str, Any]:
    """The format of the result, as far as it is known, and what is wrong with it."""
    if not converted.exists() or not _size_bytes(converted):
        return {"problems": [f"nothing is at {converted.name}"]}
    try:
        found = stacks.read(converted)
    except UserError as error:
        return {"form": None, "problems": [] if error.what == stacks.UNKNOWN else [error.what]}
    problems = list(found.problems)
    if found.form == universal.NAME or (converted / POINTER).exists():
        problems += _pointer_problems(converted)
    return {"form": found.form, "problems": problems}


def _pointer_problems(converted: Path) -> Iterator[str]:
    """`latest_universal` belongs beside the folder, and names it."""
    pointer, inside = converted.with_name(POINTER), converted / POINTER
    if inside.exists():
        yield (
            f"{POINTER} lies inside {converted.name}: the output folder was given with a trailing "
            "slash, and no loader will look there"
        )
    elif not pointer.is_file():
        yield f"there is no {POINTER} beside {converted.name}"
    else:
        named = last_bytes(pointer, 1024).decode(errors="replace").strip()
        if named != converted.name:
            yield f"{POINTER} names {named!r}, not {converted.name}"


def _message(folder: Path) -> str:
    """The last exception that the command printed, or its last line."""
    text = last_bytes(folder / "launcher.err") or last_bytes(folder / "launcher.out")
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    raised = [line for line in lines if _EXCEPTION.match(line)]
    return (raised or lines or ["it printed nothing"])[-1][:_MESSAGE_BYTES]


def _absent(folder: Path) -> bool:
    return bool(_NOT_THERE.search(_message(folder)))
