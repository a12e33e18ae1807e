"""The nouns of ckptdrill, frozen, to and from JSON. No effects, no clock, no torch.

In the order a run meets them: a `Topology` and an `Environment` make a place to run; a `Cell` is
one
address in the matrix; a drill turns it into a `Plan` of `Launch` and `Damage` steps; launches leave
`Fact` lines; the judge turns them into `Check` rows and one `Verdict` per cell.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

JsonValue = Any
T = typing.TypeVar("T")

# --------------------------------------------------------------------------------------------------
# Places


@dataclass(frozen=True)
class Topology:
    """How a job is laid out. Degrees multiply to the world size (`ep` lives inside `dp`).

    `args` are given to the job in this layout alone, after its own: the wrapper, a configuration.
    """

    name: str
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: int | None = None
    nodes: int = 1
    args: tuple[str, ...] = ()

    @property
    def dp(self) -> int:
        """Data-parallel degree: replicas times shards."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node; the matrix refuses a topology for which this is not whole."""
        return self.world_size // self.nodes

    @property
    def short(self) -> str:
        """`fsdp4`, `fsdp2tp2`, `zero2dp4`, `single`: what people say aloud."""
        parts = []
        if self.zero_stage is not None:
            parts.append(f"zero{self.zero_stage}dp{self.dp}")
        elif self.dp_replicate > 1 and self.dp_shard > 1:
            parts.append(f"hsdp{self.dp_replicate}x{self.dp_shard}")
        elif self.dp_shard > 1:
            parts.append(f"fsdp{self.dp_shard}")
        elif self.dp_replicate > 1:
            parts.append(f"ddp{self.dp_replicate}")
        parts += [
            f"{axis}{getattr(self, axis)}"
            for axis in ("tp", "pp", "cp", "ep")
            if getattr(self, axis) > 1
        ]
        return "".join(parts) or "single"

    def same_layout(self, other: Topology) -> bool:
        """Equal in every degree and argument, whatever the two are called."""
        return dataclasses.replace(self, name="") == dataclasses.replace(other, name="")


@dataclass(frozen=True)
class Environment:
    """An interpreter that has the job's frameworks. `python` is an absolute path.

    With `requirements`, `python` is what it is made with until it is built. `inherits`: it lies
    over the packages of `python`; `no_deps`: nothing but the requirements is installed.
    """

    name: str
    python: str
    requirements: tuple[str, ...] = ()
    inherits: bool = False
    no_deps: bool = False


@dataclass(frozen=True)
class MemoryTier:
    """Fast checkpoints that a job keeps beside its durable ones, below `{memory_tier}`.

    `base` is where each launch gets a folder of its own (a tmpfs), `saves` are the steps that are
    saved there, `rank_files` a glob below the folder for the files of `{rank}`.
    """

    base: str
    saves: tuple[int, ...]
    rank_files: str


@dataclass(frozen=True)
class Conversion:
    """A command that makes another checkpoint of a saved one, for a target that needs it.

    `command` is an argv of templates with `{python}`, `{source_checkpoint}` and `{converted}`;
    what it writes may take `space_factor` times the size of the source. `resume_args` stand in
    place of the job's where the result is restored (None: the job's own).
    """

    name: str
    command: tuple[str, ...]
    resume_args: tuple[str, ...] | None = None
    timeout_s: float = 600.0
    space_factor: float = 2.0


@dataclass(frozen=True)
class Job:
    """One unedited torchrun program: how it is started, resumed, and where its checkpoints appear.

    `checkpoint` is a path template with `{out}` and `{step}`, and `beside` those of what is read
    with it; `args` may hold every placeholder that `matrix.PLACEHOLDERS` lists, `resume_args` are
    appended when a checkpoint is restored.
    """

    program: str | None
    module: str | None
    args: tuple[str, ...]
    resume_args: tuple[str, ...]
    checkpoint: str
    saves: tuple[int, ...]
    restore_step: int
    window: int
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    beside: tuple[str, ...] = ()
    start_from: str | None = None
    start_step: int = 0
    stack: str | None = None  # what it saves with, by its name in claims.yaml
    memory_tier: MemoryTier | None = None

    @property
    def end_step(self) -> int:
        """The step after which a launch has shown all that the judge compares."""
        return max(self.restore_step + self.window, *self.saves)


# --------------------------------------------------------------------------------------------------
# Cells and plans


class Claim(StrEnum):
    """What Pass means for a drill. Few, and closed."""

    CONTINUES = "continues the same training"
    FAILS_CLOSED = "refuses to go on as another training"
    DETECTS_DAMAGE = "detects the damage and falls back to a whole older checkpoint"
    KEEPS_A_GENERATION = "keeps a whole generation, whatever interrupts a save"


@dataclass(frozen=True)
class Cell:
    """One address of the matrix. `id` is its folder name."""

    id: str
    source: Topology
    source_environment: str
    target: Topology
    target_environment: str
    drill: str
    parameters: Mapping[str, JsonValue] = field(default_factory=dict)
    expect: Expectation | None = None
    planned: bool = False
    drilled: bool = True  # False: nothing is started for it, documents alone decide
    conversion: str | None = None  # what is restored is the source's checkpoint, converted


@dataclass(frozen=True)
class Repro:
    """A short program that shows without the job what a cell comes to.

    `program` is an absolute path; torchrun starts it with `ranks` processes, and it is given an
    empty folder.
    """

    program: str
    ranks: int = 1


@dataclass(frozen=True)
class Expectation:
    """What the matrix says of a cell in advance; the exit code reports against it, a gate does
    not.
    """

    verdict: VerdictWord
    reason: Reason | None = None
    why: str = ""
    repro: Repro | None = None


# A part of the data order that can be out of scope alone: datasets too large for a second epoch.
EPOCH_BOUNDARY = "epoch boundary"


class RngPolicy(StrEnum):
    """What the owner declares of random state across a restore."""

    CONTINUED = "continued"
    RESEEDED = "reseeded"
    NOT_GUARANTEED = "not_guaranteed"


@dataclass(frozen=True)
class Cut:
    """How the parts of a tensor fit together that ranks hold under one name: side by side along
    `dim`, or `local`: each rank numbers its own from 0.
    """

    dim: int | None = None
    local: bool = False


@dataclass(frozen=True)
class Policy:
    """What the owner declared. An undeclared policy is not a lenient one: it leads to Unproven.

    `out_of_scope` maps an item (the text of `Item`) to why; `approved` maps a glob over
    configuration names (`args.max_steps`) to why a difference there is fine.
    """

    rng_same_world_size: RngPolicy = RngPolicy.CONTINUED
    rng_other_world_size: RngPolicy | None = None
    out_of_scope: Mapping[str, str] = field(default_factory=dict)
    approved: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Cut] = field(default_factory=dict)


@dataclass(frozen=True)
class Tolerance:
    """How far a restored run may be from the reference.

    `loss` is relative and the owner's own; None means: measured in this run, as the largest
    deviation of the repeats and of the uninterrupted control at the target topology, times
    `safety`.
    A source whose repeats differ by more than `noise` does not reproduce itself.
    """

    loss: float | None = None
    safety: float = 3.0
    noise: float = 1e-2


class Role(StrEnum):
    """Why a launch exists."""

    SOURCE = "source"  # saves, and goes on: the reference trajectory
    REPEAT = "repeat"  # the same once more: the run-to-run variance
    CONTROL = "control"  # uninterrupted at the target topology: what the topology alone changes
    RESTORE = "restore"  # the drill
    INTERRUPTED = "interrupted"  # its save is recorded file by file, perhaps under a fault


@dataclass(frozen=True)
class Checkpoint:
    """A saved step of a launch; with `damage_id`, the damaged private copy of it; with `state`, one
    of the states that the replay of that id has made; with `conversion_id`, what was made of it.
    """

    launch_id: str
    step: int
    damage_id: str | None = None
    template: str | None = None  # in place of `job.checkpoint`
    state: str | None = None
    conversion_id: str | None = None


class FaultKind(StrEnum):
    """What is done to a launch while it saves."""

    KILL = "kill"  # SIGKILL just before a file event
    TORN = "torn"  # the same, once half of the event's bytes are written
    TERMINATE = "terminate"  # SIGTERM in place of SIGKILL
    LEAVE = "leave"  # the process leaves with exit code 0 before an asynchronous save has ended
    SLOW = "slow"  # writes take long for a while
    EIO = "eio"  # writes fail with an input/output error for a while
    ENOSPC = "enospc"  # writes find the disk full for a while
    TIMEOUT = "timeout"  # writes hang, then fail with ETIMEDOUT


@dataclass(frozen=True)
class Fault:
    """One planned fault in one launch: `rank` None means every rank, `event` counts from 0 in the
    file events that the rank made during its save.
    """

    kind: FaultKind
    rank: int | None = None
    event: int | None = None
    parameters: Mapping[str, JsonValue] = field(default_factory=dict)


class TierLoss(StrEnum):
    """What happens to a memory tier between the failure and the restore."""

    ALL = "all"  # every host is new: nothing of it is left
    ONE_RANK = "one-rank"  # the files of one rank are gone with its host
    STALE = "stale"  # it holds an older generation than the durable storage


@dataclass(frozen=True)
class Tier:
    """The memory tier that a launch finds: a copy of what `launch_id` left in its own, after
    `loss` (None: as it was).
    """

    launch_id: str
    loss: TierLoss | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Launch:
    """One torchrun. Steps are in the job's own numbering."""

    id: str
    role: Role
    topology: Topology
    environment: str
    stop_step: int
    restores: Checkpoint | None = None
    extra_args: tuple[str, ...] = ()  # appended to the job's own
    launcher: str | None = None  # None: whatever the run chose
    fault: Fault | None = None
    tier: Tier | None = None
    over: Checkpoint | None = None  # lies where the last step will be saved
    waits_for: str | None = None  # a step that plans this one
    host: str | None = None  # what it takes for the name of its host, in place of this node's
    quiet: bool = False  # its random layers are silenced: for the first gradient alone
    other_stream_from: int | None = None  # draws other random numbers from this step on

    @property
    def after(self) -> tuple[str, ...]:
        """Ids of the steps that must have ended before this one starts."""
        tier = (self.tier.launch_id,) if self.tier else ()
        planner = (self.waits_for,) if self.waits_for else ()
        lies_there = (self.over.launch_id,) if self.over else ()
        return tuple(dict.fromkeys((*self._restored_from, *tier, *lies_there, *planner)))

    @property
    def _restored_from(self) -> tuple[str, ...]:
        if self.restores is None:
            return ()
        made_by = self.restores.damage_id or self.restores.conversion_id
        return (made_by or self.restores.launch_id,)


class DamageKind(StrEnum):
    """How a private copy of a checkpoint is changed."""

    BIT_FLIP = "bit-flip"  # one bit of one element
    HEADER_FLIP = "header-flip"  # one bit of what a reader follows to the elements
    TRUNCATE = "truncate"
    ZERO_FILL = "zero-fill"  # a block of a tensor's bytes
    DELETE = "delete"
    SWAP = "swap"  # the shards of two ranks exchanged
    FOREIGN_SHARD = "foreign-shard"  # one shard is that of another saved step
    POINTER = "pointer"  # no shard, but `latest` and its like; parameter `lie`: a `PointerLie`


class PointerLie(StrEnum):
    """What a pointer to the newest checkpoint says that is not so."""

    MISSING = "missing"  # it names a step that is not there
    UNCOMMITTED = "uncommitted"  # it names a step whose save never finished
    GARBAGE = "garbage"
    EMPTY = "empty"
    STALE = "stale"  # it names an older whole step
    REMOVED = "removed"


class Guard(StrEnum):
    """Whether the launcher verifies a checkpoint before the job loads it."""

    NONE = "none"
    MANIFEST = "manifest"  # and restores the newest older one that is whole, where this one is not


@dataclass(frozen=True)
class Damage:
    """A change to an isolated copy of a checkpoint."""

    id: str
    kind: DamageKind
    checkpoint: Checkpoint
    parameters: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def after(self) -> tuple[str, ...]:
        """The launch that wrote the checkpoint."""
        return (self.checkpoint.launch_id,)


@dataclass(frozen=True)
class Replay:
    """Every state that an interruption of a recorded save can leave, made offline.

    `recorded` and `again` are the same save, both undisturbed: what differs between them cannot be
    compared. `confirm` of the points are interrupted in real launches.
    """

    id: str
    recorded: Launch
    again: Launch
    kinds: tuple[FaultKind, ...]
    confirm: int

    @property
    def after(self) -> tuple[str, ...]:
        """The two recordings."""
        return (self.recorded.id, self.again.id)


@dataclass(frozen=True)
class Convert:
    """A conversion of a saved checkpoint, run once for all cells that restore the result.

    `topology` and `environment` are those of the launch that saved it.
    """

    id: str
    name: str
    checkpoint: Checkpoint
    topology: Topology
    environment: str

    @property
    def after(self) -> tuple[str, ...]:
        """The launch that wrote the checkpoint."""
        return (self.checkpoint.launch_id,)


Step = Launch | Damage | Replay | Convert


@dataclass(frozen=True)
class Plan:
    """What one cell needs, by the part each step plays in the judgement."""

    cell: Cell
    claim: Claim
    source: Launch
    repeats: tuple[Launch, ...]
    baseline: Launch  # restore at the source topology, no fault: the control of every verdict
    restore: Launch  # the drilled restore (for the baseline drill: the same as `baseline`)
    control: Launch | None = None  # uninterrupted at the target topology
    # The source once more, with other random numbers after the save: where the owner promises none.
    other_stream: Launch | None = None
    damage: Damage | None = None
    through: Launch | None = None  # the restored run whose own checkpoint is restored again
    stalled: Launch | None = None  # the source once more, on storage that fails for a while
    generations: tuple[Launch, ...] = ()  # restores of what `stalled` left, newest first
    failing: tuple[Launch, ...] = ()  # the source up to a failure: its memory tier is restored
    intact: Launch | None = None  # restores beside a memory tier that lost nothing
    replay: Replay | None = None  # plans further launches once it has run
    conversion: Convert | None = None  # makes what `restore` restores

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step once, dependencies first; none for a cell that is not drilled."""
        if not self.cell.drilled:
            return ()
        ordered: list[Step] = [self.source, *self.repeats, *self.failing]
        if self.replay:
            ordered += [self.replay.recorded, self.replay.again, self.replay]
        others = (
            *(self.other_stream, self.control, self.baseline, self.damage, self.through),
            *(self.stalled, self.conversion),
        )
        restores = (*self.generations, self.intact, self.restore)
        ordered += [step for step in (*others, *restores) if step]
        return tuple({step.id: step for step in ordered}.values())


# --------------------------------------------------------------------------------------------------
# Facts, checks, verdicts


# Kinds that launches of one topology have in common, but for times and paths.
COMMON_KINDS = frozenset(
    {"batch", "code", "event", "gradient", "imported", "inventory", "load_begin", "load_end"}
    | {"process_group"}
    | {"restored", "rng", "roots", "save_begin", "save_end", "state", "stepped", "stopped"}
)


class Fact(msgspec.Struct, frozen=True, gc=False):
    """One recorded line, no opinion. When it was written, how long it took and which path it names
    is no part of it: launches that record the same share their facts, and `LaunchRecord` tells.

    Read back by the million, which is why it is no dataclass.
    """

    kind: str
    rank: int
    step: int
    data: Mapping[str, JsonValue]
    line: int


class Derived:
    """What was worked out from facts, by what it is: done once, and gone with the facts."""

    def __init__(self) -> None:
        self._found: dict[object, Any] = {}

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returns, made at the first time that `key` is asked for."""
        if key not in self._found:
            self._found[key] = make()
        found: T = self._found[key]
        return found


@dataclass(frozen=True, eq=False)
class Common:
    """What launches have in common that recorded the same: the facts of `kinds`, by kind and within
    it rank by rank in file order, and the last step that each rank told of in them.

    What `derived` holds follows from these alone, so one launch may take it from another.
    """

    kinds: frozenset[str]
    facts: Mapping[str, tuple[Fact, ...]]
    last_steps: Mapping[int, int]
    derived: Derived = field(default_factory=Derived)


class Apart(typing.Protocol):
    """What lines tell besides their facts, by rank and number of the line."""

    def t(self, rank: int, line: int) -> float:
        """When it was written, in seconds since 1970."""

    def took_s(self, rank: int, line: int) -> float | None:
        """How long what it tells of took, where it says so."""

    def path(self, rank: int, line: int) -> str | None:
        """The path that it names, where it names one."""


@dataclass(frozen=True, eq=False)
class LaunchRecord:
    """All that one launch left on disk. `ended` is the content of exit.json, None if it never ran.

    `own` has the facts of all other kinds than those in `common`, in the same order.
    """

    launch_id: str
    common: Common
    own: Mapping[str, tuple[Fact, ...]]
    apart: Apart
    ended: Mapping[str, JsonValue] | None
    world_size: int

    @classmethod
    def made_of(
        cls,
        launch_id: str,
        facts: Iterable[Fact],
        ended: Mapping[str, JsonValue] | None,
        world_size: int,
    ) -> LaunchRecord:
        """The record of facts that tell everything themselves: `t`, `took_s` and `path` stand in
        their data.
        """
        by_kind: dict[str, list[Fact]] = {}
        last_steps: dict[int, int] = {}
        for fact in sorted(facts, key=place_of):
            by_kind.setdefault(fact.kind, []).append(fact)
            last_steps[fact.rank] = max(fact.step, last_steps.get(fact.rank, 0))
        kinds = {kind: tuple(found) for kind, found in by_kind.items()}
        return cls(
            launch_id,
            Common(frozenset(kinds), kinds, last_steps),
            {},
            _InFacts({place_of(f): f.data for found in kinds.values() for f in found}),
            ended,
            world_size,
        )

    def of(self, kind: str, rank: int | None = None) -> tuple[Fact, ...]:
        """The facts of one kind, rank by rank in file order; of one rank or of all."""
        found = (self.common.facts if kind in self.common.kinds else self.own).get(kind, ())
        return found if rank is None else tuple(f for f in found if f.rank == rank)

    @functools.cached_property
    def facts(self) -> tuple[Fact, ...]:
        """All of them, rank by rank in file order."""
        kinds = (*self.common.facts.values(), *self.own.values())
        return tuple(sorted((fact for found in kinds for fact in found), key=place_of))

    @functools.cached_property
    def last_steps(self) -> Mapping[int, int]:
        """The last step that each rank told of, for those that recorded anything."""
        steps = dict(self.common.last_steps)
        for kind in COMMON_KINDS - self.common.kinds:
            for fact in self.own.get(kind, ()):
                steps[fact.rank] = max(fact.step, steps.get(fact.rank, 0))
        return steps

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that recorded anything."""
        return tuple(self.last_steps)

    @functools.cached_property
    def derived(self) -> Derived:
        """What follows from this launch alone."""
        return Derived()

    def has_in_common(self, kinds: Iterable[str]) -> bool:
        """Launches that recorded the same share all facts of these kinds."""
        return self.common.kinds.issuperset(kinds)

    def derived_from(self, *kinds: str) -> Derived:
        """Where to keep what follows from the facts of these kinds alone."""
        return self.common.derived if self.has_in_common(kinds) else self.derived

    def ref(self, fact: Fact) -> str:
        """`launches/<id>/rank0.jsonl:12`, as verdicts cite it."""
        return f"launches/{self.launch_id}/rank{fact.rank}.jsonl:{fact.line}"

    def refs(self, facts: Iterable[Fact]) -> tuple[str, ...]:
        """`ref` of each."""
        return tuple(map(self.ref, facts))

    def t(self, fact: Fact) -> float:
        """When it was recorded, in seconds since 1970."""
        return self.apart.t(fact.rank, fact.line)

    # A line that somebody else wrote may have these two among the rest.

    def took_s(self, fact: Fact) -> float:
        """How long what it tells of took; 0 where it does not say."""
        apart_s = self.apart.took_s(fact.rank, fact.line)
        return float(fact.data.get("took_s") or 0.0) if apart_s is None else apart_s

    def path(self, fact: Fact) -> str | None:
        """The path that it names, if any."""
        path = self.apart.path(fact.rank, fact.line)
        return fact.data.get("path") if path is None else path


@dataclass(frozen=True)
class _InFacts:
    """What facts tell themselves of what stands apart else, by rank and line."""

    data: Mapping[tuple[int, int], Mapping[str, JsonValue]]

    def t(self, rank: int, line: int) -> float:
        return float(self.data[rank, line]["t"])

    def took_s(self, rank: int, line: int) -> float | None:
        return self.data[rank, line].get("took_s")

    def path(self, rank: int, line: int) -> str | None:
        return self.data[rank, line].get("path")


def place_of(fact: Fact) -> tuple[int, int]:
    """Rank and line: by it facts stand rank by rank in file order."""
    return fact.rank, fact.line


class Item(StrEnum):
    """The state inventory, in the order of the proof of continuity."""

    KEYS = "keys, shapes and dtypes"
    STEP = "completed step"
    WEIGHTS = "weights"
    BUFFERS = "buffers"
    MOMENTS = "optimizer state"
    HYPERPARAMETERS = "parameter groups and hyper-parameters"
    SCHEDULER = "learning-rate schedule"
    PRECISION = "scaler, EMA and precision state"
    DATA = "data order"
    RNG = "random state"
    CONFIGURATION = "configuration"
    TOPOLOGY = "topology and mechanism"
    INVENTORY = "the job's own saved state"
    GRADIENTS = "first gradients"
    UPDATES = "first updates"
    LOSS = "loss"
    DAMAGE = "damage"
    GENERATION = "kept generations"


class Held(StrEnum):
    """What the facts say of one item."""

    HELD = "held"
    BROKEN = "broken"
    NOT_OBSERVED = "not observed"
    NOT_EXERCISED = "not exercised"
    OUT_OF_SCOPE = "out of scope"  # declared so in the matrix


@dataclass(frozen=True)
class Check:
    """One row of the state inventory of one cell."""

    item: Item
    status: Held
    summary: str
    subjects: tuple[str, ...] = ()  # the tensors, groups, ranks or samples to blame, worst first
    details: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()  # refs of the facts it rests on
    numbers: Mapping[str, JsonValue] = field(default_factory=dict)
    next_move: str = ""


class VerdictWord(StrEnum):
    """Three, and only three."""

    PASS = "Pass"  # noqa: S105 - a verdict, not a password
    UNSUPPORTED = "Unsupported"
    UNPROVEN = "Unproven"


class Reason(StrEnum):
    """Why a cell got its verdict; a closed list, in the order the judge tries them."""

    NOT_RUN = "not-run"
    HARNESS_ERROR = "harness-error"
    DOCUMENTED_LIMIT = "documented-limit"
    SOURCE_FAILED = "source-failed"
    CONTROL_FAILED = "control-failed"
    FAULT_NOT_FIRED = "fault-not-fired"
    HUNG = "hung"
    TIMED_OUT = "timed-out"
    REFUSED = "refused"
    CRASHED = "crashed"
    HALF_CONVERTED = "half-converted"
    DIVERGED = "diverged"
    UNSAFE_SAVE = "unsafe-save"
    BATCH_PLAN = "batch-plan"
    TRAINS_OTHERWISE = "trains-otherwise"
    NOISY_REFERENCE = "noisy-reference"
    EVIDENCE_MISSING = "evidence-missing"
    NOT_EXERCISED = "not-exercised"
    HELD = "held"
    FELL_BACK = "fell-back"
    FAILED_CLOSED = "failed-closed"


@dataclass(frozen=True)
class Verdict:
    """The judgement of one cell, with everything that decided it."""

    cell_id: str
    claim: Claim
    word: VerdictWord
    reason: Reason
    explanation: str  # one sentence a person can act on
    blame_item: Item | None = None
    blame_subject: str | None = None  # tensor, file, rank …
    checks: tuple[Check, ...] = ()
    facts: tuple[str, ...] = ()
    next_move: str = ""
    numbers: Mapping[str, JsonValue] = field(default_factory=dict)

    def meets(self, expectation: Expectation | None) -> bool:
        """True when the cell came out as the matrix said; without a word of it,
        Pass is expected.
        """
        if expectation is None:
            return self.word is VerdictWord.PASS
        return self.word is expectation.verdict and expectation.reason in (None, self.reason)


# --------------------------------------------------------------------------------------------------
# To and from JSON


def to_json(value: Any) -> JsonValue:
    """Nouns to plain JSON values: dataclasses become objects, enums their text, tuples lists."""
    return _in_lists(msgspec.to_builtins(value, str_keys=True, enc_hook=_plain))


def _in_lists(value: Any) -> JsonValue:
    """The same with lists for tuples, which are left as they are else."""
    if type(value) is dict:
        return {key: _in_lists(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [each if type(each) is str else _in_lists(each) for each in value]
    return value


def _plain(value: Any) -> Any:
    """A mapping that is no dict, or a sequence that is no list, as one.

    Raises TypeError for anything else.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON has")


def from_json(noun: type[T], data: JsonValue) -> T:
    """The reverse of `to_json` for the nouns above.

    Raises TypeError or ValueError when `data` does not have the shape of `noun`.
    """
    return typing.cast("T", _decode(noun, data))


def _decode(annotation: Any, data: JsonValue) -> Any:
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        return _decode_union(typing.get_args(annotation), data)
    if origin is tuple:
        return tuple(_decode(typing.get_args(annotation)[0], item) for item in data)
    if dataclasses.is_dataclass(annotation):
        return _decode_dataclass(annotation, data)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return annotation(data)
    return data


def _decode_union(members: tuple[Any, ...], data: JsonValue) -> Any:
    """Only `X | None` occurs in the nouns, so the one member that is not None decides."""
    (member,) = (m for m in members if m is not type(None))
    return _decode(member, data)


def _decode_dataclass(noun: Any, data: JsonValue) -> Any:
    if not isinstance(data, Mapping):
        message = f"expected an object for {noun.__name__}, found {type(data).__name__}"
        raise TypeError(message)
    hints = _hints(noun)
    return noun(**{key: _decode(hints[key], value) for key, value in data.items() if key in hints})


@functools.cache
def _hints(noun: Any) -> Mapping[str, Any]:
    """Resolving annotations costs more than decoding with them."""
    hints = typing.get_type_hints(noun)
    return {f.name: hints[f.name] for f in dataclasses.fields(noun)}
