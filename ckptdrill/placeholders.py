"""`{out}`, `{resume}`, `{world_size}` …: the only thing a job's command line learns from a drill.

A template is checked when the matrix is read (`problem_in`), so that a misspelt placeholder never
costs a launch, and filled when a launch is written (`fill`). `{{` and `}}` stand for the braces
themselves, so that JSON can be passed as an argument.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from ckptdrill.errors import UserError
from ckptdrill.model import Job, Topology
from ckptdrill.spelling import did_you_mean, listed

PLACEHOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "out": "the folder for checkpoints of this launch; holds what is restored in place",
        "resume": "the checkpoint to restore; empty text when the launch starts from scratch",
        "step": "the step of that checkpoint; in `checkpoint`, the saved step",
        "topology": "the name of the topology",
        "world_size": "number of ranks",
        "nodes": "number of nodes",
        "ranks_per_node": "ranks on each node",
        "dp": "data-parallel degree: replicas times shards",
        "dp_replicate": "data-parallel replicas",
        "dp_shard": "data-parallel shards",
        "tp": "tensor-parallel degree",
        "pp": "pipeline-parallel degree",
        "cp": "context-parallel degree",
        "ep": "expert-parallel degree",
        "zero_stage": "ZeRO stage; the topology must declare it",
        "jobs": "the folder of the shipped reference jobs",
        "memory_tier": "the folder for fast checkpoints of this launch (`job.memory_tier`)",
    }
)
# What the command of a conversion is told, beside the step and the degrees of the source.
OF_A_CONVERSION: Mapping[str, str] = MappingProxyType(
    {
        "python": "the interpreter of the source's environment",
        "source_checkpoint": "a private copy of the checkpoint to convert",
        "converted": "where the result must appear: a path beside that copy, not there yet",
    }
)
_TOKEN = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")
_WIDTH = re.compile(r"0?[1-9][0-9]?d?")
_TEXTS = ("out", "resume", "topology", "jobs", "memory_tier")
_LITERAL = {"{{": "{", "}}": "}"}


def placeholder_values(
    topology: Topology,
    *,
    out: Path | str,
    resume: Path | str | None,
    step: int | None,
    memory_tier: Path | None = None,
) -> dict[str, object]:
    """The value of every placeholder but `{jobs}`, which the matrix fills when it is read."""
    axes = ("world_size", "nodes", "ranks_per_node", "dp", "dp_replicate", "dp_shard")
    degrees = (*axes, "tp", "pp", "cp", "ep", "zero_stage")
    return {
        "out": out,
        "resume": "" if resume is None else resume,
        "step": step,
        "topology": topology.name,
        "memory_tier": memory_tier,
        **{name: getattr(topology, name) for name in degrees},
    }


def used(template: str) -> set[str]:
    """The placeholder names in `template`."""
    tokens = _TOKEN.findall(template)
    return {_parts(token)[0] for token in tokens if len(token) > 2}


def resumes_in_place(job: Job) -> bool:
    """True when the job is never told a path: it finds the newest checkpoint in `{out}` itself."""
    texts = (*job.args, *job.resume_args, *job.env.values())
    return not any("resume" in used(text) for text in texts)


def _parts(token: str) -> tuple[str, str]:
    """Name and number format of `{step:07d}`."""
    name, _, spec = token[1:-1].partition(":")
    return name, spec


def problem_in(template: str, allowed: Collection[str] = PLACEHOLDERS.keys()) -> str | None:
    """What is wrong with `template`, in words; None when every placeholder is allowed."""
    for token in _TOKEN.findall(template):
        if token in _LITERAL:
            continue
        if len(token) == 1:
            return f"a lone {token!r}; write {token * 2!r} for the brace itself"
        name, spec = _parts(token)
        if name not in allowed:
            near = did_you_mean(name, allowed)
            names = listed(f"{{{name}}}" for name in allowed)
            return f"unknown placeholder {token}{near}; allowed: {names}; '{{{{' is a plain brace"
        if spec and (not _WIDTH.fullmatch(spec) or name in _TEXTS):
            return f"cannot format {token}; a number takes a width, as in {{step:07d}}"
    return None


def fill(template: str, values: Mapping[str, object], where: str) -> str:
    """`template` with every placeholder replaced by its value.

    Raises UserError, naming `where`, for a placeholder that is unknown or has no value (None).
    """
    problem = problem_in(template, values.keys())
    if problem:
        raise UserError(problem, where=where)
    empty = sorted(name for name in used(template) if values[name] is None)
    if empty:
        raise UserError(f"{{{empty[0]}}} has no value here", where=where, hint=_NO_VALUE_HINT)
    return _TOKEN.sub(lambda token: _replacement(token[0], values), template)


_NO_VALUE_HINT = "declare it (`zero_stage` of the topology), or leave the placeholder out"


def fill_only(template: str, name: str, value: str) -> str:
    """`template` with `{name}` replaced, and everything else, escapes included, left as it is."""
    escaped = value.replace("{", "{{").replace("}", "}}")
    return _TOKEN.sub(lambda t: escaped if t[0] == f"{{{name}}}" else t[0], template)


def _replacement(token: str, values: Mapping[str, object]) -> str:
    if token in _LITERAL:
        return _LITERAL[token]
    name, spec = _parts(token)
    return format(int(str(values[name])), spec) if spec else str(values[name])


def saved_to(below_out: str) -> str:
    """A pattern of the paths that a save of this checkpoint is made to: it, or one below it.

    A path that is told from it by a mark of something temporary (`.step-8`, `step-8.tmp`) is the
    same: safe writers save beside it and rename.
    """
    temporary = r"(?:[._~]|te?mp[._-]?)*"
    return rf"/{temporary}{re.escape(below_out.strip('/'))}(?![A-Za-z0-9])"
