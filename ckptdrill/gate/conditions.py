"""Whether a migration may go ahead: every condition, with what was found and what to do. Pure.

A gate never reads `expect`: what an owner foresaw is still no Pass. A condition that nobody can
tell is not held, and says what is missing; so does one whose part of the packet cannot be read.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ckptdrill.model import Claim, Held, Item, JsonValue, Reason, VerdictWord
from ckptdrill.packet.text import counted, seconds

NO_IMAGE = "none"


class Standing(StrEnum):
    """How a condition stands. Only the first lets a migration pass."""

    HELD = "held"
    NOT_HELD = "not held"
    NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Condition:
    """One condition: how it stands, what was found, and what to do unless it is held."""

    name: str
    standing: Standing
    found: str
    next_move: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that will be resumed, compared with its manifest.

    `problems` are (kind, text). `marker` is the file that commits it, `""` for a format that has
    none, None when the manifest cannot tell.
    """

    problems: tuple[tuple[str, str], ...] = ()
    marker: str | None = None
    files: int = 0


@dataclass(frozen=True)
class Approval:
    """A recorded approval. `problem` is why it does not count, empty when it does; without an
    approver nobody has approved anything.
    """

    approver: str = ""
    approved_utc: str = ""
    key: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Inputs:
    """All that the gate looks at; None where something was not given or cannot be read.

    `packet` is packet.json, `policy` the `policy` of matrix.yaml. `installed` and `program_sha256`
    are of the environment and the training code that will run. Times are seconds since 1970.
    `trusted` is the public key (hex) that the approval must be signed by.
    """

    problems: tuple[str, ...]
    packet: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, JsonValue] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    installed: Mapping[str, str] | None = None
    program_sha256: str | None = None
    image_digest: str | None = None
    ended_s: float | None = None
    now_s: float = 0.0
    max_age_s: float = 0.0
    approval: Approval | None = None
    trusted: str | None = None


def conditions(inputs: Inputs) -> tuple[Condition, ...]:
    """Every condition in the order of the contract, the approver last."""
    return tuple(_judged(name, rule, inputs) for name, rule in _RULES.items())


def of_drill(inputs: Inputs) -> tuple[Condition, ...]:
    """The conditions that a packet alone decides. The others need the checkpoint that will be
    resumed, the environment that will run it, a clock, a person.
    """
    return tuple(_judged(name, _RULES[name], inputs) for name in _OF_DRILL)


_Found = tuple[Standing, str, str]


def _judged(name: str, rule: Callable[[Inputs], _Found], inputs: Inputs) -> Condition:
    try:
        standing, found, next_move = rule(inputs)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        found = "packet.json cannot be read, or has another shape than this version writes"
        return Condition(name, Standing.NOT_KNOWN, found, "`ckptdrill judge RUN` derives it again")
    return Condition(name, standing, found, "" if standing is Standing.HELD else next_move)


def _held(found: str) -> _Found:
    return Standing.HELD, found, ""


def _not_held(found: str, next_move: str) -> _Found:
    return Standing.NOT_HELD, found, next_move


def _not_known(found: str, next_move: str) -> _Found:
    return Standing.NOT_KNOWN, found, next_move


def _first(texts: Iterable[str]) -> str:
    """The first of several findings, and how many more there are."""
    found = list(texts)
    return found[0] if len(found) == 1 else f"{found[0]} (and {len(found) - 1} more)"


# --------------------------------------------------------------------------------------------------
# The evidence itself


def _intact(inputs: Inputs) -> _Found:
    if inputs.problems:
        return _not_held(_first(inputs.problems), "drill again: a changed packet proves nothing")
    return _held("every file is as it was written")


def _source(inputs: Inputs) -> _Found:
    unchanged = inputs.packet["summary"]["source_unchanged"]
    if unchanged is True:
        return _held("no source checkpoint changed under the run")
    if unchanged is False:
        return _not_held("a source checkpoint changed under the run", "drill again on a quiet copy")
    return _not_known("not recorded", "continue the run with --resume")


# --------------------------------------------------------------------------------------------------
# The checkpoint that will be resumed

_NO_MANIFEST = {"manifest-missing", "manifest-unreadable", "version-unknown"}
_MARKER = {
    "marker-missing",
    "marker-differs",
    "marker-newer-than-manifest",
    "manifest-newer-than-marker",
}
_OF_MANIFEST = {*_NO_MANIFEST, "not-committed", "path-escapes"}
_ANOTHER = "resume another generation: `ckptdrill manifest select`"
_NAME_IT = "name the checkpoint that will be resumed: --checkpoint PATH"


def _of_kinds(checkpoint: Checkpoint, kinds: set[str]) -> list[str]:
    return [text for kind, text in checkpoint.problems if kind in kinds]


def _manifest(inputs: Inputs) -> _Found:
    if inputs.checkpoint is None:
        return _not_known("no checkpoint was named", _NAME_IT)
    found = _of_kinds(inputs.checkpoint, _OF_MANIFEST)
    if found:
        move = "publish it with its manifest: `ckptdrill manifest write` or `publish`"
        return _not_held(_first(found), move)
    return _held(f"there, committed, and compared with {counted(inputs.checkpoint.files, 'file')}")


def _beside_manifest(inputs: Inputs, rule: Callable[[Checkpoint], _Found]) -> _Found:
    """What a rule says of the checkpoint, where there is a manifest to compare it with."""
    if inputs.checkpoint is None:
        return _not_known("no checkpoint was named", _NAME_IT)
    if _of_kinds(inputs.checkpoint, _NO_MANIFEST):
        return _not_known("there is no usable manifest", "`ckptdrill manifest write PATH`")
    return rule(inputs.checkpoint)


def _marker(inputs: Inputs) -> _Found:
    return _beside_manifest(inputs, _marker_of)


def _marker_of(checkpoint: Checkpoint) -> _Found:
    found = _of_kinds(checkpoint, _MARKER)
    if found:
        return _not_held(_first(found), _ANOTHER)
    if checkpoint.marker is None:
        return _not_known("the format is unknown, and its marker with it", "resume a known one")
    if not checkpoint.marker:
        return _held("this format has no marker: its manifest, published last, is the commit")
    return _held(f"{checkpoint.marker} is there and no newer than the manifest")


def _hashes(inputs: Inputs) -> _Found:
    return _beside_manifest(inputs, _hashes_of)


def _hashes_of(checkpoint: Checkpoint) -> _Found:
    known = _OF_MANIFEST | _MARKER
    found = [text for kind, text in checkpoint.problems if kind not in known]
    if found:
        return _not_held(_first(found), _ANOTHER)
    return _held("every file has its recorded size and SHA-256")


# --------------------------------------------------------------------------------------------------
# What the drill showed


def _planned(inputs: Inputs) -> list[Mapping[str, Any]]:
    return [cell for cell in inputs.packet["cells"] if cell["planned_path"] is True]


def _path(inputs: Inputs) -> _Found:
    planned = _planned(inputs)
    if not planned:
        return _not_held("no cell is on the planned path", "name cells in planned_path, and drill")
    open_cells = [
        f"{cell['id']} is {cell['verdict']} ({cell['reason']})"
        for cell in planned
        if cell["verdict"] != VerdictWord.PASS
    ]
    if open_cells:
        return _not_held(_first(open_cells), "mend it as the packet says, and drill again")
    return _held(f"{counted(len(planned), 'cell')} of the planned path, all Pass")


def _rows(inputs: Inputs, item: Item) -> dict[str, str]:
    """The status of a row, by planned cell that claims to continue; `missing` where it has none."""
    return {
        cell["id"]: next((c["status"] for c in cell["checks"] if c["item"] == item), "missing")
        for cell in _planned(inputs)
        if cell["claim"] == Claim.CONTINUES
    }


def _every_row(inputs: Inputs, item: Item, allowed: set[str], next_move: str) -> _Found:
    rows = _rows(inputs, item)
    if not rows:
        return _not_known("no planned cell continues a training", "name one in planned_path")
    bad = [f"{name}: {item} is {status}" for name, status in rows.items() if status not in allowed]
    if bad:
        return _not_held(_first(bad), next_move)
    return _held(f"{item}: shown on {counted(len(rows), 'planned cell')}")


def _cursor(inputs: Inputs) -> _Found:
    move = "let the job show its data order; out of scope is not enough for a migration"
    return _every_row(inputs, Item.DATA, {Held.HELD}, move)


def _rng(inputs: Inputs) -> _Found:
    move = "declare policy.rng in the matrix, and drill again"
    sizes = [_sizes(cell) for cell in _planned(inputs)]
    declared = inputs.policy.get("rng")
    other = declared.get("other_world_size") if isinstance(declared, Mapping) else None
    if other is None and any(source != target for source, target in sizes):
        return _not_held("policy.rng.other_world_size is not declared", move)
    return _every_row(inputs, Item.RNG, {Held.HELD, Held.OUT_OF_SCOPE}, move)


def _sizes(cell: Mapping[str, Any]) -> tuple[int, int]:
    return cell["address"]["source"]["world_size"], cell["address"]["target"]["world_size"]


def _loss(inputs: Inputs) -> _Found:
    move = "find out why; a wider tolerance.loss is the owner's decision, and is shown as such"
    return _every_row(inputs, Item.LOSS, {Held.HELD}, move)


def _fallback(inputs: Inputs) -> _Found:
    """A damaged or lost newest checkpoint from which training came back by itself."""
    shown = [
        cell["id"]
        for cell in inputs.packet["cells"]
        if cell["verdict"] == VerdictWord.PASS
        if cell["reason"] == Reason.FELL_BACK or _older_generations(cell)
    ]
    if shown:
        return _held(_first([f"shown by {name}" for name in shown]))
    move = "drill corrupt-shard with a job that falls back to an older whole checkpoint"
    return _not_held("no cell shows a fallback to durable storage", move)


def _older_generations(cell: Mapping[str, Any]) -> int:
    """After how many interruptions of a save training went on from an older whole checkpoint."""
    counts = (row["numbers"].get("counts", {}) for row in cell["checks"])
    return sum(int(each.get("older", 0)) for each in counts)


# --------------------------------------------------------------------------------------------------
# Whether the evidence still speaks of what will run


def _versions(inputs: Inputs) -> _Found:
    names = {cell["address"]["target"]["environment"] for cell in _planned(inputs)}
    recorded = inputs.packet["run"]["recorded"].get("installed") or {}
    drilled = {name: recorded[name] for name in sorted(names) if recorded.get(name)}
    if not names or drilled.keys() != names:
        return _not_known("the packet does not hold the versions it was made with", "drill again")
    if inputs.installed is None:
        return _not_known(
            "the environment that will run was not looked at", "name its interpreter: --python PATH"
        )
    differ = [
        f"{key}: drilled {was.get(key, 'without')}, will run {inputs.installed.get(key, 'without')}"
        for was in drilled.values()
        for key in sorted(was.keys() | inputs.installed.keys())
        if was.get(key) != inputs.installed.get(key) and not _approved(inputs, key)
    ]
    if differ:
        return _not_held(
            _first(differ),
            "drill in that environment, or approve `software.NAME` in policy.approved",
        )
    return _held(f"equal or approved: {', '.join(sorted(inputs.installed))}")


def _approved(inputs: Inputs, name: str) -> bool:
    patterns = inputs.policy.get("approved") or {}
    return any(fnmatch.fnmatchcase(f"software.{name}", pattern) for pattern in patterns)


def _image(inputs: Inputs) -> _Found:
    was = inputs.packet["run"]["recorded"].get("image_digest")
    if was is None:
        move = f"drill with `run --image-digest` ({NO_IMAGE} where there is no image)"
        return _not_known("the packet does not hold the image it was made in", move)
    if inputs.image_digest is None:
        move = f"--image-digest DIGEST ({NO_IMAGE} where there is no image)"
        return _not_known("the image that will run was not named", move)
    if was != inputs.image_digest:
        return _not_held(
            f"drilled in {was}, will run in {inputs.image_digest}", "drill in that image"
        )
    return _held("drilled without an image" if was == NO_IMAGE else f"drilled in {was}")


def _code(inputs: Inputs) -> _Found:
    was = inputs.packet["run"]["recorded"].get("program_sha256")
    if was is None:
        move = "drill with job.program: a module's file is not recorded"
        return _not_known("the packet does not hold the digest of the training script", move)
    if inputs.program_sha256 is None:
        return _not_known("the training script was not found", "name it: --program FILE")
    if was != inputs.program_sha256:
        return _not_held("the training script is another one than was drilled", "drill it again")
    return _held(f"the script drilled, sha256 {was[:12]}…")


def _age(inputs: Inputs) -> _Found:
    if inputs.ended_s is None:
        return _not_known("the run has no end", "continue it with --resume")
    age_s = inputs.now_s - inputs.ended_s
    if age_s < 0:
        return _not_held("the run ends in the future: a clock was wrong", "drill again")
    if age_s > inputs.max_age_s:
        limit = seconds(inputs.max_age_s)
        return _not_held(f"{seconds(age_s)} old, more than {limit}", "drill again, or --max-age")
    return _held(f"{seconds(age_s)} old, at most {seconds(inputs.max_age_s)}")


def _approver(inputs: Inputs) -> _Found:
    approval = inputs.approval
    if approval is None:
        return _not_held("nobody has approved", "--approver NAME --sign-key FILE")
    if approval.problem:
        move = "approve again" if approval.approver else "see to that first, then approve"
        return _not_held(approval.problem, f"{move}: --approver NAME --sign-key FILE")
    who = f"{approval.approver}, {approval.approved_utc}, key {approval.key[:16]}…"
    if inputs.trusted is None:
        return _not_known(f"{who}: nobody says whose key that is", "name it: --public-key FILE")
    if inputs.trusted != approval.key:
        return _not_held(f"{who}: not the key of --public-key", "let the right person approve")
    return _held(who)


_RULES: Mapping[str, Callable[[Inputs], _Found]] = {
    "packet intact": _intact,
    "source unchanged": _source,
    "manifest verified": _manifest,
    "commit marker last": _marker,
    "hashes match": _hashes,
    "versions": _versions,
    "planned path": _path,
    "data cursor": _cursor,
    "random state policy": _rng,
    "loss in tolerance": _loss,
    "durable fallback": _fallback,
    "evidence age": _age,
    "image": _image,
    "training code": _code,
    "approver": _approver,
}
NAMES: Sequence[str] = tuple(_RULES)
_OF_DRILL = (
    "source unchanged",
    "planned path",
    "data cursor",
    "random state policy",
    "loss in tolerance",
    "durable fallback",
)
