"""Judge what surrounds the state: configuration and code, the topology that really ran, the
damage.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

from ckptdrill.judge import state as states
from ckptdrill.judge import versions
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import (
    Check,
    DamageKind,
    Fact,
    Held,
    Item,
    JsonValue,
    LaunchRecord,
    Plan,
    PointerLie,
    Policy,
)

_VERSIONS = ("torch", "cuda", "python")


def configuration(
    pair: Pair, policy: Policy, *, same_environment: bool, resume_only: Sequence[str] = ()
) -> Check:
    """Arguments, code and versions: equal, or on the approved list.

    `resume_only` are arguments that only a resumed run is given: no fault in themselves, but the
    first thing to look at when the state is restored and the updates are others.
    """
    unseen = _not_started(pair)
    if unseen:
        return Check(Item.CONFIGURATION, Held.NOT_OBSERVED, unseen)
    source, target = pair.reference.record.of("started"), pair.restored.record.of("started")
    refs = pair.reference.record.refs(source[:1]) + pair.restored.record.refs(target[:1])
    problems = []
    if source[0].data["program_sha256"] != target[0].data["program_sha256"]:
        problems.append("program: the script changed between the source run and the restore")
    problems += _version_problems(source[0], target[0]) if same_environment else []
    problems += _named_problems("code", _code(pair.reference.record), _code(pair.restored.record))
    problems += _named_problems("config", _told(pair.reference.record), _told(pair.restored.record))
    open_problems = [p for p in problems if not _approved(p, policy.approved)]
    if open_problems:
        return Check(
            Item.CONFIGURATION, Held.BROKEN, open_problems[0], tuple(open_problems), (), refs
        )
    approved = tuple(f"approved: {p}" for p in problems)
    told = tuple(f"only the resumed run is given `{argument}`" for argument in resume_only)
    summary = "same program and versions"
    if not same_environment:
        skew = versions.skew(pair.reference.record, pair.restored.record)
        summary = f"same program; {skew.text}"
        for run in (pair.reference, pair.restored):
            refs += run.record.refs(run.record.of("imported")[:1])
    return Check(
        Item.CONFIGURATION, Held.HELD, summary, tuple(resume_only), (*approved, *told), refs
    )


def topology(pair: Pair, plan: Plan) -> Check:
    """Both world sizes as planned, and by which call the state came back."""
    unseen = _not_started(pair)
    if unseen:
        return Check(Item.TOPOLOGY, Held.NOT_OBSERVED, unseen)
    source, target = pair.reference.record.of("started"), pair.restored.record.of("started")
    refs = pair.reference.record.refs(source[:1]) + pair.restored.record.refs(target[:1])
    wanted = (plan.source.topology.world_size, plan.restore.topology.world_size)
    found = (_world_size(source), _world_size(target))
    if found != wanted:
        return Check(
            Item.TOPOLOGY,
            Held.BROKEN,
            f"world sizes {found[0]} -> {found[1]} ran, {wanted[0]} -> {wanted[1]} were planned",
            ("world size",),
            (),
            refs,
        )
    record = pair.restored.record
    # What was loaded from memory, which is told by an empty path, came there by another call.
    loads = sorted({f.data["call"] for f in record.of("load_end") if record.path(f) != ""})
    how = ", ".join(loads) if loads else "no load call that the observer knows"
    mechanism = _mechanism(pair, plan)
    summary = f"{plan.source.topology.short} -> {plan.restore.topology.short} by {how}"
    summary += f" ({_IN_WORDS[mechanism].format(name=plan.conversion and plan.conversion.name)})"
    summary += _empty_handed(pair.restored)
    numbers = {"mechanism": mechanism.value}
    return Check(Item.TOPOLOGY, Held.HELD, summary, facts=refs, numbers=numbers)


class Mechanism(StrEnum):
    """How a state came to where it is trained on."""

    NATIVE = "native"
    RESHARD = "reshard at load"
    CONVERSION = "conversion"
    WEIGHTS_ONLY = "weights-only"


_IN_WORDS = {
    Mechanism.NATIVE: "native: the layout it was saved in",
    Mechanism.RESHARD: "resharded at load",
    Mechanism.CONVERSION: "from the conversion {name}",
    Mechanism.WEIGHTS_ONLY: "weights only: the optimizer began afresh",
}


def _mechanism(pair: Pair, plan: Plan) -> Mechanism:
    """By what the optimizer had at the first forward, then by what was planned."""
    before, after = (
        _has_moments(run, pair.restore_step) for run in (pair.reference, pair.restored)
    )
    if before and not after:
        return Mechanism.WEIGHTS_ONLY
    if plan.conversion is not None:
        return Mechanism.CONVERSION
    alike = plan.source.topology.same_layout(plan.restore.topology)
    return Mechanism.NATIVE if alike else Mechanism.RESHARD


def _has_moments(run: Trajectory, step: int) -> bool:
    return any(
        not states.is_master(name)
        for fact in run.sample("state", step)
        for name in fact.data["optimizer"]
    )


def _empty_handed(run: Trajectory) -> str:
    """DeepSpeed's load returns nothing, and raises nothing, where it finds no pointer."""
    loads = run.record.of("engine_load")
    empty = bool(loads) and not any(f.data["found"] for f in loads)
    return "; the engine found nothing to load, and returned that" if empty else ""


def damage(record: Mapping[str, JsonValue] | None, framework: str) -> Check:
    """The planned damage must have changed bytes: hash before is not hash after.

    The row also says who noticed: `framework` is what the stack made of it, in words.
    """
    if record is None:
        return Check(Item.DAMAGE, Held.NOT_OBSERVED, "the damage step left no record")
    where = described(record)
    reference = (f"damages/{record['id']}.json",)
    if not record.get("fired"):
        return Check(
            Item.DAMAGE, Held.NOT_EXERCISED, f"{where}: the bytes are as before", facts=reference
        )
    said = "; ".join(part for part in (where, framework, _manifest(record)) if part)
    numbers = {"manifest": [f"{p['path']}: {p['kind']}" for p in _problems(record)]}
    return Check(Item.DAMAGE, Held.HELD, said, facts=reference, numbers=numbers)


def described(record: Mapping[str, JsonValue]) -> str:
    """`bit-flip of __0_0.distcp (tensor embed.weight)`, `latest named step-12, which was not
    there`.
    """
    kind = record.get("kind", "damage")
    where = str(record.get("file", "the checkpoint"))
    if kind == DamageKind.POINTER:
        return _lie(record, where)
    if kind == DamageKind.SWAP:
        return f"swapped {where} and {record.get('other')}"
    if record.get("tensor"):
        where += f" (tensor {record['tensor']})"
    if kind == DamageKind.FOREIGN_SHARD:
        return f"{where} was that of step {record.get('foreign_step')}"
    return f"{kind} of {where}"


def told_of(record: Mapping[str, JsonValue]) -> str:
    """What was done, and what a manifest says of it."""
    return "; ".join(filter(None, (described(record), _manifest(record))))


def _lie(record: Mapping[str, JsonValue], pointer: str) -> str:
    said = next((p["after"] for p in record.get("pointers", ()) if p["path"] == pointer), None)
    words: Mapping[JsonValue, str] = {
        PointerLie.MISSING: f"named {said}, which was not there",
        PointerLie.UNCOMMITTED: f"named {said}, whose save had not finished",
        PointerLie.GARBAGE: "held garbage",
        PointerLie.EMPTY: "was empty",
        PointerLie.STALE: f"named the older {said}",
        PointerLie.REMOVED: "was gone",
    }
    return f"{pointer} {words.get(record.get('lie'), 'lied')}"


def _manifest(record: Mapping[str, JsonValue]) -> str:
    """What a manifest of the undamaged checkpoint says of the damaged copy; empty: not asked."""
    asked = record.get("manifest")
    if asked is None:
        return ""
    if asked["problems"] is None:
        return f"no manifest could be made: {asked['refused']}"
    paths = list(dict.fromkeys(p["path"] for p in asked["problems"]))
    if not paths:
        return "a manifest finds nothing"
    named = {1: paths[0], 2: "both"}.get(len(paths), f"{len(paths)} files")
    if len(paths) == 2 and set(paths) != {record.get("file"), record.get("other")}:
        named = " and ".join(paths)
    kinds = ", ".join(dict.fromkeys(p["kind"] for p in asked["problems"]))
    return f"a manifest names {named} ({kinds})"


def _problems(record: Mapping[str, JsonValue]) -> Sequence[Mapping[str, JsonValue]]:
    return (record.get("manifest") or {}).get("problems") or ()


def not_given(source: LaunchRecord, restore: LaunchRecord) -> str | None:
    """The file, below `{out}`, that the restored job did not find where it was given a copy of the
    checkpoint, and that the source run saved.
    """
    written = {source.path(fact) or "" for fact in source.of("save_begin")}
    inside = re.compile(rf"work/{re.escape(restore.launch_id)}/(?:restore|out)/([^'\"]+)")
    for fact in restore.of("crashed"):
        for error in fact.data["error"]:
            found = inside.search(error["message"]) if _is_missing(error) else None
            if found and any(path.endswith(f"/out/{found[1]}") for path in written):
                return found[1]
    return None


def _is_missing(error: Mapping[str, JsonValue]) -> bool:
    return str(error["type"]).endswith("FileNotFoundError") or "o such file" in error["message"]


def observer_failures(records: Sequence[LaunchRecord]) -> tuple[str, ...]:
    """What the observer itself could not do; evidence around it is incomplete."""
    return tuple(
        f"{f.data['where']}: {f.data['error'][0]['message']} ({record.ref(f)})"
        for record in records
        for f in record.of("observer_failed")
    )


def _not_started(pair: Pair) -> str | None:
    """The first rank that did not record how it was started, in words."""
    for run in (pair.reference, pair.restored):
        silent = run.silent(run.record.of("started"))
        if silent:
            return f"rank {silent[0]} of {run.record.launch_id} did not record how it was started"
    return None


def _world_size(started: Sequence[Fact]) -> int:
    return max((int(f.data["world_size"]) for f in started), default=0)


def _version_problems(source: Fact, target: Fact) -> list[str]:
    return [
        f"software.{name}: {target.data.get(name)}, the writer had {source.data.get(name)}"
        for name in _VERSIONS
        if source.data.get(name) != target.data.get(name)
    ]


def _named_problems(
    kind: str, source: Mapping[str, JsonValue], target: Mapping[str, JsonValue]
) -> list[str]:
    """What both runs name and do not agree on. What only one names was not reached by the other."""
    return [
        f"{kind}.{name}: differs between the source run and the restore"
        for name in sorted(source.keys() & target.keys())
        if source[name] != target[name]
    ]


def _code(record: LaunchRecord) -> Mapping[str, JsonValue]:
    """SHA-256 of the user's own modules, by name."""
    return {n: sha for f in record.of("code") for n, sha in f.data["files"].items()}


def _told(record: LaunchRecord) -> Mapping[str, JsonValue]:
    """Configuration that the job told through the probe."""
    facts = [f for f in record.of("probe") if f.data["what"] == "config"]
    return {f.data["name"]: f.data["leaves"] for f in facts}


def _approved(problem: str, approved: Mapping[str, str]) -> bool:
    name = problem.split(":", 1)[0]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in approved)
