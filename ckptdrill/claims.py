"""What the pinned documents claim of a restore: as data, and beside a verdict.

The run records facts and the judge decides; this module does neither. `claims.yaml` holds what each
page states, restricts or leaves out, per stack and migration case, with the quote and where it was
read. In the order in which it is used: the file is read once and checked (`every`, `stacks`);
`for_cell` finds the claims that a change of layout and a drill put to the test; `agreement` says
how one of them stands to the verdict. A claim never makes a verdict better or worse: only a cell
that nobody drills is decided by a document (`exclusions`).

Pure, but for reading that one shipped file. The model's `Claim` is another thing: what Pass means.
"""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ckptdrill.errors import UserError
from ckptdrill.model import Held, Item, Reason, Topology, Verdict, VerdictWord
from ckptdrill.spelling import did_you_mean, listed

_FILE = Path(__file__).with_name("claims.yaml")
QUOTE_LIMIT_WORDS = 25


class Label(StrEnum):
    """What a document does with a case; no row is ever `Pass`: that takes a drill."""

    DOCUMENTED = "Documented"  # a pinned page states it
    LIMIT = "Limit"  # a pinned page restricts it
    UNPROVEN = "Unproven"  # the page was read and states nothing


class MigrationCase(StrEnum):
    """What a claim is about: the columns of the documentation matrix."""

    WORLD_SIZE = "world-size"
    DATA_PARALLEL = "data-parallel"
    TENSOR_PARALLEL = "tensor-parallel"
    PIPELINE_PARALLEL = "pipeline-parallel"
    EXPERT_PARALLEL = "expert-parallel"
    ZERO_STAGE = "zero-stage"
    SHARDING = "sharding"
    HARDWARE = "hardware"
    OPTIMIZER_FORMAT = "optimizer-format"
    WEIGHTS_ONLY = "weights-only"
    TRAINING_STATE = "training-state"
    DATA_CURSOR = "data-cursor"
    RANDOM_STATE = "random-state"
    KEYS = "keys"
    ASYNC_SAVE = "async-save"
    COMMIT = "commit"
    CORRUPTION = "corruption"
    POINTER = "pointer"
    MEMORY_TIER = "memory-tier"
    VERSION_SKEW = "version-skew"


class Change(StrEnum):
    """How a target differs from its source. `any` stands for whatever differs, or nothing."""

    ANY = "any"
    NONE = "none"
    WORLD_SIZE = "world-size"
    DP = "dp"
    TP = "tp"
    PP = "pp"
    CP = "cp"
    EP = "ep"
    ZERO_STAGE = "zero-stage"
    SHARDING = "sharding"


class Agreement(StrEnum):
    """How a claim stands to the verdict of a cell; in the order in which a reader wants them."""

    CONTRADICTED = "the drill contradicts the documentation"
    BEYOND = "holds beyond its documentation"
    AS_LIMITED = "fails as the documentation says"
    CONFIRMED = "the drill confirms the documentation"
    UNDOCUMENTED = "measured, where the documentation states nothing"
    OPEN = "not settled by a drill"

    @property
    def disagrees(self) -> bool:
        """The documentation and the drill do not say the same."""
        return self in (Agreement.CONTRADICTED, Agreement.BEYOND)


@dataclass(frozen=True)
class Source:
    """Where a claim was read. `version` is what the page or file belongs to; `read` a date."""

    title: str
    address: str
    version: str
    read: str


@dataclass(frozen=True)
class Stack:
    """What a job saves with, or (kind `storage`) on. `family` names several stacks at once."""

    id: str
    title: str
    family: str
    kind: str = "framework"


@dataclass(frozen=True)
class CellRule:
    """Cells that put a claim to the test: all of its three parts have to fit.

    No `changes`: any. No `drills`: every drill that makes no fault of its own. `zero_stages` holds
    stages of source or target; a topology that names no stage fits all of them.
    """

    changes: tuple[Change, ...] = ()
    drills: tuple[str, ...] = ()
    zero_stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class DocumentedClaim:
    """One statement of one source.

    `quote` is verbatim and at most 25 words; None with the label Unproven means that the source
    states nothing. `verified` is False where the quote was not found at its source: then `source`
    is the report that cites it. `items` are the state items it speaks of (none: the restore as a
    whole), `cells` what tests it (none: no cell of a matrix can). `excludes`: the document does not
    only restrict the case, it rules it out.
    """

    id: str
    stacks: tuple[str, ...]
    case: MigrationCase
    label: Label
    says: str
    quote: str | None
    source: Source
    verified: bool = True
    excludes: bool = False
    items: tuple[Item, ...] = ()
    cells: tuple[CellRule, ...] = ()


# --------------------------------------------------------------------------------------------------
# The file


def _short(quote: str) -> str:
    words = len(quote.split())
    if words > QUOTE_LIMIT_WORDS:
        raise ValueError(f"a quote of {words} words; allowed: {QUOTE_LIMIT_WORDS}")
    return quote


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _SourceForm(_Form):
    title: str
    address: str
    version: str
    read: dt.date


class _StackForm(_Form):
    title: str
    family: str
    kind: Literal["framework", "storage"] = "framework"


class _RuleForm(_Form):
    changes: tuple[Change, ...] = ()
    drills: tuple[str, ...] = ()
    zero_stages: tuple[int, ...] = ()


class _ClaimForm(_Form):
    id: str
    stacks: Annotated[tuple[str, ...], Field(min_length=1)]
    case: MigrationCase
    label: Label
    says: Annotated[str, Field(min_length=1)]
    quote: Annotated[str, AfterValidator(_short)] | None
    source: str
    verified: bool = True
    excludes: bool = False
    items: tuple[Item, ...] = ()
    cells: tuple[_RuleForm, ...]


class _FileForm(_Form):
    sources: dict[str, _SourceForm]
    stacks: dict[str, _StackForm]
    claims: list[_ClaimForm]


@functools.cache
def _file() -> _FileForm:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return _FileForm.model_validate(yaml.load(_FILE.read_bytes(), loader))  # noqa: S506 - both safe


@functools.cache
def stacks() -> Mapping[str, Stack]:
    """Every stack and storage by its name, in the order of the file."""
    return {
        name: Stack(name, form.title, form.family, form.kind)
        for name, form in _file().stacks.items()
    }


@functools.cache
def every() -> tuple[DocumentedClaim, ...]:
    """All claims, in the order of the file. Raises pydantic's ValidationError if it is damaged."""
    return tuple(map(_claim, _file().claims))


def _claim(form: _ClaimForm) -> DocumentedClaim:
    source = _file().sources[form.source]
    return DocumentedClaim(
        id=form.id,
        stacks=tuple(_named(form.stacks)),
        case=form.case,
        label=form.label,
        says=form.says,
        quote=form.quote,
        source=Source(source.title, source.address, source.version, source.read.isoformat()),
        verified=form.verified,
        excludes=form.excludes,
        items=form.items,
        cells=tuple(CellRule(rule.changes, rule.drills, rule.zero_stages) for rule in form.cells),
    )


def _named(words: Iterable[str]) -> list[str]:
    """The stacks that names and families stand for. Raises KeyError for a word that is neither."""
    found: list[str] = []
    for word in words:
        family = [name for name, stack in stacks().items() if stack.family == word]
        found += family or [stacks()[word].id]
    return found


def stack(name: str) -> Stack:
    """The stack called `name`. Raises UserError when there is none."""
    if name not in stacks():
        raise UserError(
            f"no stack {name!r}{did_you_mean(name, stacks())}",
            hint=f"known: {listed(stacks())}",
        )
    return stacks()[name]


def of_stack(name: str) -> tuple[DocumentedClaim, ...]:
    """The claims that speak of one stack; none for a name that is unknown."""
    return tuple(claim for claim in every() if name in claim.stacks)


# --------------------------------------------------------------------------------------------------
# Which claims a cell tests

# Drills that bring a fault or another program: a claim about a layout says nothing of them.
FAULT_DRILLS = frozenset(
    {
        "corrupt-shard",
        "interrupted-save",
        "lying-pointer",
        "memory-tier-loss",
        "resume-options",
        "semantic-change",
        "storage-stall",
        "version-skew",
    }
)


def changes_between(source: Topology, target: Topology) -> frozenset[Change]:
    """Every way in which two layouts differ; `none` alone when they do not."""
    pairs = {
        Change.WORLD_SIZE: (source.world_size, target.world_size),
        Change.DP: (source.dp, target.dp),
        Change.TP: (source.tp, target.tp),
        Change.PP: (source.pp, target.pp),
        Change.CP: (source.cp, target.cp),
        Change.EP: (source.ep, target.ep),
        Change.ZERO_STAGE: (source.zero_stage, target.zero_stage),
        Change.SHARDING: (source.dp_replicate > 1, target.dp_replicate > 1),
    }
    changed = frozenset(change for change, (before, after) in pairs.items() if before != after)
    return changed or frozenset({Change.NONE})


def for_cell(
    stack: str | None, source: Topology, target: Topology, drill: str
) -> tuple[DocumentedClaim, ...]:
    """The claims of `stack` that a cell puts to the test, in the order of the file.

    None (the matrix names no stack) and unknown names have no claims.
    """
    if stack is None:
        return ()
    changed = changes_between(source, target)
    stages = frozenset({source.zero_stage, target.zero_stage})
    return tuple(
        claim
        for claim in of_stack(stack)
        if any(_fits(rule, changed, stages, drill) for rule in claim.cells)
    )


def exclusions(
    stack: str | None, source: Topology, target: Topology, drill: str
) -> tuple[DocumentedClaim, ...]:
    """The claims by which a pinned document rules a cell out."""
    return tuple(claim for claim in for_cell(stack, source, target, drill) if claim.excludes)


def _fits(
    rule: CellRule, changed: frozenset[Change], stages: frozenset[int | None], drill: str
) -> bool:
    drilled = drill in rule.drills if rule.drills else drill not in FAULT_DRILLS
    layout = not rule.changes or Change.ANY in rule.changes or bool(changed & set(rule.changes))
    stage = not rule.zero_stages or bool(stages & {None, *rule.zero_stages})
    return drilled and layout and stage


# --------------------------------------------------------------------------------------------------
# Claim and verdict


def agreement(claim: DocumentedClaim, verdict: Verdict) -> Agreement:
    """How `claim` stands to the verdict of a cell that tests it."""
    held = _held(claim, verdict)
    if held is None:
        return Agreement.OPEN
    if claim.label is Label.UNPROVEN:
        return Agreement.UNDOCUMENTED
    if claim.label is Label.DOCUMENTED:
        return Agreement.CONFIRMED if held else Agreement.CONTRADICTED
    return Agreement.BEYOND if held else Agreement.AS_LIMITED


# Verdicts that show nothing of a document: no drill, and what only the topology decides.
_ANOTHER_MATTER = (Reason.BATCH_PLAN, Reason.TRAINS_OTHERWISE, Reason.DOCUMENTED_LIMIT)


def _held(claim: DocumentedClaim, verdict: Verdict) -> bool | None:
    """Whether what the claim speaks of held in the drill; None where that was not shown.

    Its own items decide, so that weights which held confirm their claim although the data order
    broke. A claim about the restore as a whole, and any refusal, stand and fall with the verdict.
    """
    if verdict.word is VerdictWord.UNPROVEN:
        return None
    rows = [check.status for check in verdict.checks if check.item in claim.items]
    if verdict.word is VerdictWord.PASS:
        return True if not rows or Held.HELD in rows else None
    if verdict.reason is Reason.REFUSED:
        return False
    if not claim.items:
        return None if verdict.reason in _ANOTHER_MATTER else False
    if Held.BROKEN in rows or verdict.blame_item in claim.items:
        return False
    return True if rows and set(rows) == {Held.HELD} else None
