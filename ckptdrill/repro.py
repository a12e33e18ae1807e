"""Replay one cell by hand: the shell script beside its verdict. Pure text, nothing is started.

Whoever doubts a verdict, or has to mend the framework behind it, needs a command and no more: the
script makes a fresh copy of the checkpoint, sets what the job's environment was given, and executes
plain torchrun. The run itself, its checkpoints and its facts stay as they are.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ckptdrill import tiers
from ckptdrill.launch.local import cold_command
from ckptdrill.model import Launch, Plan
from ckptdrill.step import (
    Setting,
    beside,
    copy_target,
    describe,
    out_of,
    pointers_of,
    restored,
    restored_path,
    resumes_in_place,
    tier_of,
)
from ckptdrill.store import REPRO_NAME

# Stands for the folder of a replay until the shell knows it.
_WORK = "@WORK@"
# The drill's own way to another host name; who may not have one is told so, and nothing is started.
_RENAME = """import os, sys
from ckptdrill_observer.cage import rename_host
try:
    rename_host(sys.argv[1])
except OSError as error:
    sys.exit(f"no process may have another host name here: {error}")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def repro_script(setting: Setting, plan: Plan) -> str:
    """The script that repeats the drilled launch of a cell: the restore, or the run that stalls.

    It needs nothing of ckptdrill but the observer in the run folder.
    """
    launch = plan.stalled or plan.restore
    content = _replaced(describe(setting, launch, "torchrun"), _replay_folders(setting, launch))
    content["env"] = _changes(content["env"])
    lines = [
        "#!/bin/sh",
        *_explanation(setting, plan),
        "set -eu",
        *_alone_lines(plan, content),
        'WORK="${1:-$(mktemp -d)}"',
        '[ ! -e "$WORK/launch.json" ] || { echo "$WORK holds a replay already" >&2; exit 1; }',
        'mkdir -p "$WORK/out" "$WORK/scratch" "$WORK/facts"',
        'WORK="$(cd "$WORK" && pwd)"',
        *_copy_lines(setting, launch),
        *_tier_lines(setting, launch),
        f'sed "s|{_WORK}|$WORK|g" > "$WORK/launch.json" <<\'END_OF_LAUNCH\'',
        json.dumps(content, indent=1, sort_keys=True),
        "END_OF_LAUNCH",
        f"cd {shlex.quote(str(content['cwd']))}",
        "set -x",
        "exec env \\",
        *(f"  {name}={_quote(value)} \\" for name, value in content["env"].items()),
        "  " + " ".join(_quote(word) for word in (*_on_host(content), *cold_command(content))),
    ]
    return "\n".join(lines) + "\n"


def _explanation(setting: Setting, plan: Plan) -> Iterator[str]:
    launch, cell = plan.stalled or plan.restore, plan.cell
    yield f"# Cell {cell.id}: drill {cell.drill}, {_place(plan.source)} to {_place(launch)}."
    given = restored(setting, launch)
    if given is not None:
        yield f"# Restores step {given.step} of launch {given.launch_id}."
    if launch.restores is not None and launch.restores.state is not None:
        yield "# What it restores is what an interrupted save of that step leaves; where it was"
        yield f"# interrupted, and what every file holds: state {launch.restores.state} in"
        yield f"#   {setting.run.replay(launch.restores.damage_id or '')}"
    elif launch.restores is not None and launch.restores.damage_id is not None:
        if given == launch.restores:
            yield "# What it is given was damaged on purpose; what was changed, with hashes:"
        else:
            yield f"# A guard chose it in place of step {launch.restores.step}, damaged on purpose:"
        yield f"#   {setting.run.damage(launch.restores.damage_id)}"
    if launch.host is not None:
        yield f"# It sees {launch.host} as the name of its host, as in the drill."
    if launch.fault is not None:
        yield "# Storage below OUT fails as `fault` in launch.json says. The observer does that:"
        yield "# without it nothing fails."
    yield "# Usage: repro.sh [FOLDER]; without one, in a new temporary folder. It works on a fresh"
    yield "# copy, and the facts go to FOLDER/facts. To run without the observer, take"
    yield "# `-m ckptdrill_observer` out of the command: the job then goes on after step"
    yield f"# {launch.stop_step}, where the drill ended it."
    if cell.expect and cell.expect.repro:
        yield f"# `repro.sh --alone [FOLDER]` starts {REPRO_NAME}, which shows without the job what"
        yield "# the cell is expected to come to."


def _alone_lines(plan: Plan, content: Mapping[str, Any]) -> Iterator[str]:
    """Start the program that shows the same without the job: in the job's environment, less what
    names the folders of its launch.
    """
    repro = plan.cell.expect.repro if plan.cell.expect else None
    if repro is None:
        return
    options = ("--nproc-per-node", str(repro.ranks), "--rdzv-backend", "c10d")
    torchrun = (content["python"], "-m", "torch.distributed.run", *options)
    environment = {name: text for name, text in content["env"].items() if _WORK not in text}
    yield 'if [ "${1:-}" = --alone ]; then'
    yield f'  PROGRAM="$(cd "$(dirname "$0")" && pwd)/{REPRO_NAME}"'
    yield '  FOLDER="${2:-$(mktemp -d)}"'
    yield '  mkdir -p "$FOLDER"'
    yield '  cd "$FOLDER"'
    yield "  exec env \\"
    yield from (f"    {name}={_quote(text)} \\" for name, text in environment.items())
    command = " ".join(_quote(word) for word in (*torchrun, "--rdzv-endpoint", "localhost:0"))
    yield f'    {command} "$PROGRAM" "$PWD"'
    yield "fi"


def _on_host(content: Mapping[str, Any]) -> tuple[str, ...]:
    """What stands before the command of a launch that sees another name of its host."""
    if content["hostname"] is None:
        return ()
    return (content["python"], "-c", _RENAME, content["hostname"])


def _place(launch: Launch) -> str:
    return f"{launch.topology.short} ({launch.topology.world_size} ranks, {launch.environment})"


def _copy_lines(setting: Setting, launch: Launch) -> Iterator[str]:
    source = restored_path(setting, launch)
    if source is None:
        return
    target = str(copy_target(setting, launch, source))
    copy = _quote(_replaced(target, _replay_folders(setting, launch)))
    yield f"SOURCE={shlex.quote(str(source))}"
    yield '[ -e "$SOURCE" ] || { echo "$SOURCE is gone: run again with --keep" >&2; exit 1; }'
    yield f'mkdir -p "$(dirname {copy})"'
    # Links are followed: what the replay writes must not reach the run.
    if target == str(out_of(setting.run, launch.id)):
        yield f'cp -RLp "$SOURCE/." {copy}'
    else:
        yield f'cp -RLp "$SOURCE" {copy}'
    for other, place in beside(setting, launch):
        there = _quote(_replaced(str(place), _replay_folders(setting, launch)))
        yield f"[ -e {there} ] || cp -RLp {shlex.quote(str(other))} {there}"
    if resumes_in_place(setting):
        yield f"POINTERS={shlex.quote(str(pointers_of(setting, launch)))}"
        yield '[ ! -d "$POINTERS" ] || cp -RPp "$POINTERS/." "$WORK/out/"'


def _tier_lines(setting: Setting, launch: Launch) -> Iterator[str]:
    """What the launch found in its memory tier; a replay has it on disk."""
    if setting.matrix.job.memory_tier is None:
        return
    yield 'mkdir -p "$WORK/memory-tier"'
    if launch.tier is not None:
        left = shlex.quote(str(tiers.left_for(setting.run, launch.id)))
        yield f'cp -RLp {left}/. "$WORK/memory-tier/"'


def _replay_folders(setting: Setting, launch: Launch) -> dict[str, str]:
    """The launch's own folders, and where a replay has them."""
    tier = tier_of(setting, launch)
    return {
        **({} if tier is None else {str(tier): f"{_WORK}/memory-tier"}),
        str(setting.run.launch(launch.id) / "launch.json"): f"{_WORK}/launch.json",
        str(setting.run.launch(launch.id)): f"{_WORK}/facts",
        str(setting.run.work(launch.id)): _WORK,
    }


def _changes(environment: Mapping[str, str]) -> dict[str, str]:
    """What the job's environment adds to ours or changes in it, by name."""
    return {k: v for k, v in sorted(environment.items()) if os.environ.get(k) != v}


def _quote(text: str) -> str:
    """`text` for the shell, with the replay's folder left for the shell to fill in."""
    return '"$WORK"'.join(shlex.quote(part) if part else "" for part in text.split(_WORK)) or "''"


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in texts.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {key: _replaced(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, texts) for item in value]
    return value
