"""What a packet says, as one frozen object. Pure: no file, no clock, and no verdict made here.

`build` takes run.json, sources.json, and the stored plan and verdict of every cell, in any order.
Each cell is decoded on its own, so that one damaged file costs one cell: without a readable verdict
a cell is Unproven, whatever else is known about it. Then the cells are put in order, worst first,
counted, summed up in one sentence and laid out as a grid of source and target against drill.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptdrill.claims import Stack
from ckptdrill.errors import EXIT_CODE_MEANING, ExitCode, worst
from ckptdrill.isolate import guard_in_words
from ckptdrill.ledger import PHASES
from ckptdrill.model import (
    Cell,
    Check,
    Claim,
    Expectation,
    Item,
    JsonValue,
    Launch,
    Plan,
    Reason,
    Topology,
    Verdict,
    VerdictWord,
    from_json,
)
from ckptdrill.packet import documented, lines, manifests, text
from ckptdrill.packet.documented import ClaimView
from ckptdrill.packet.lines import CitedLine
from ckptdrill.packet.manifests import ManifestView
from ckptdrill.packet.run import RunView, of_run
from ckptdrill.store import REPRO_NAME

# A conversion is a phase of the cells that have one, and not missing in the others.
CONVERSION = "conversion"
# What exit.json says of a launch's read-only view of the sources.
BOUND = ("bound_read_only", "bind_refused")
_RANK_FACT = re.compile(r"launches/([^/]+)/(rank\d+)\.jsonl:(\d+)")
# What decoding a file of another shape, or of a newer ckptdrill, raises.
_NOT_A_NOUN = (TypeError, ValueError, KeyError, IndexError, AttributeError)


# --------------------------------------------------------------------------------------------------
# What goes in


@dataclass(frozen=True)
class StoredCell:
    """The files of one cell as JSON values; None where a file is missing or could not be read.

    `launches` maps the id of each launch of the run that began to its launch.json, with the keys
    BOUND of its exit.json and, under manifests.KEY, what its manifests.json lists. `lines` are the
    beginnings of the lines of facts to show, by their ref.
    """

    id: str
    plan: JsonValue = None
    verdict: JsonValue = None
    damage: JsonValue = None
    launches: Mapping[str, JsonValue] = field(default_factory=dict)
    replayable: bool = False
    has_repro: bool = False
    lines: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------
# What comes out


@dataclass(frozen=True)
class FactRef:
    """A cited fact.

    `file` is the path to link to, None when the ref is not one of this folder. `label` is short
    enough for a table: `restore rank0:12`, or the ref itself.
    """

    ref: str
    file: str | None
    label: str


@dataclass(frozen=True)
class CheckView:
    """One row of the state inventory."""

    item: Item
    status: str
    summary: str
    subjects: tuple[str, ...]
    details: tuple[str, ...]
    next_move: str
    facts: tuple[FactRef, ...]
    numbers: Mapping[str, JsonValue]


@dataclass(frozen=True)
class LaunchView:
    """One launch of a cell, by the part that it plays.

    `launcher` says how it was started, `guard` how the checkpoint that it was given was kept apart
    from the source, and whether it saw the sources read-only; both are empty where nothing is
    recorded.
    """

    part: str
    id: str
    topology: str
    environment: str
    stop_step: int
    restores: str
    launcher: str
    guard: str
    ranks: int
    begun: bool


@dataclass(frozen=True)
class DamagedFile:
    """One file of a damaged copy; hashes are empty where the record has none."""

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class DamageView:
    """A planned damage and what its record says. No files: the damage left no record."""

    id: str
    kind: str
    guard: str
    files: tuple[DamagedFile, ...]


@dataclass(frozen=True)
class PointView:
    """One point at which a save was interrupted, and what it leaves to go on from.

    `pieces` says of how many stored pieces of tensors the generation is known, empty where none is.
    """

    id: str
    where: str
    kept: str
    steps_lost: int | None
    pieces: str
    confirmed: bool
    why: str


@dataclass(frozen=True)
class Phases:
    """Where a restore spent its time, in seconds. Phases in `merged` could not be told apart."""

    seconds: tuple[tuple[str, float], ...]
    missing: tuple[str, ...]
    merged: tuple[str, ...]
    wall_s: float | None


@dataclass(frozen=True)
class CellView:
    """One cell: what it is, what was found, and what that rests on."""

    id: str
    word: VerdictWord
    reason: Reason
    explanation: str
    claim: str
    source: str
    target: str
    drill: str
    parameters: tuple[tuple[str, str], ...]
    planned: bool
    blame_item: Item | None
    blame_subject: str | None
    next_move: str
    checks: tuple[CheckView, ...]
    not_judged: tuple[Item, ...]
    facts: tuple[FactRef, ...]
    expected: bool
    expectation: Expectation | None
    launches: tuple[LaunchView, ...]
    damage: DamageView | None
    phases: Phases | None
    replay: str | None
    repro: str | None = None
    cell: Cell | None = field(repr=False, default=None)
    documented: tuple[ClaimView, ...] = ()
    points: tuple[PointView, ...] = ()
    manifests: tuple[ManifestView, ...] = ()
    lines: tuple[tuple[FactRef, CitedLine], ...] = ()
    numbers: Mapping[str, JsonValue] = field(repr=False, default_factory=dict)

    @property
    def severity(self) -> int:
        """0 diverged, 1 otherwise Unsupported, 2 Unproven, 3 Pass."""
        if self.word is VerdictWord.UNSUPPORTED:
            return 0 if self.reason is Reason.DIVERGED else 1
        return 2 if self.word is VerdictWord.UNPROVEN else 3

    @property
    def variant(self) -> str:
        """`kind bit-flip`: the parameters that tell cells of one address apart."""
        return ", ".join(f"{name} {value}" for name, value in self.parameters)

    @property
    def precision(self) -> str:
        """`float32`: the element types of the parameters; empty where none was seen."""
        rows = [check.numbers for check in self.checks if check.item is Item.KEYS]
        dtypes = rows[0].get("parameter_dtypes") if rows else None
        found = dtypes if isinstance(dtypes, Mapping) else {}
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in found)

    @property
    def route(self) -> str:
        """`fsdp4 → fsdp2`."""
        return f"{self.source} → {self.target}"

    @property
    def address(self) -> str:
        """`fsdp4 → fsdp2, dp-shrink`: how people name the cell; its id when nothing is known."""
        return f"{self.route}, {self.drill}" if self.cell else self.id


@dataclass(frozen=True)
class GridRow:
    """One source and target; a tuple of cells for every drill of the grid. Ranks: `4 → 2`."""

    source: str
    target: str
    ranks: str
    cells: tuple[tuple[CellView, ...], ...]


@dataclass(frozen=True)
class Grid:
    """Source and target against drill; rows with the worst cell first."""

    drills: tuple[str, ...]
    rows: tuple[GridRow, ...]


@dataclass(frozen=True)
class GateRow:
    """How a condition of the gate stands (held, not held, not known), and what to do about it."""

    name: str
    standing: str
    found: str
    next_move: str


@dataclass(frozen=True)
class ApprovalView:
    """Who approved the packet, when (UTC) and with which key; every condition and what was found.

    `packet_sha256` is the digest of the list of checksums, which the approval speaks of.
    """

    approver: str
    approved_utc: str
    key: str
    packet_sha256: str
    conditions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PacketView:
    """A whole packet. `cells` are sorted worst first."""

    run: RunView
    headline: str
    counts: Mapping[VerdictWord, int]
    diverged: int
    unexpected: int
    exit_code: ExitCode
    exit_meaning: str
    cells: tuple[CellView, ...]
    grid: Grid

    @property
    def disagreements(self) -> tuple[tuple[CellView, ClaimView], ...]:
        """Where documentation and drill do not say the same, cells in their order."""
        return tuple(
            (cell, view)
            for cell in self.cells
            for view in cell.documented
            if view.agreement.disagrees
        )


# --------------------------------------------------------------------------------------------------
# Building


def build(
    run_json: Mapping[str, JsonValue],
    cells: Iterable[StoredCell],
    sources: JsonValue = None,
    given: JsonValue = None,
) -> PacketView:
    """The view of a run from run.json, its stored cells, sources.json, and the manifest of the
    checkpoint that the run was given; equal input gives an equal view.
    """
    stack = documented.stack_of(run_json.get("stack"))
    views = [_cell(stored, stack, given) for stored in cells]
    views.sort(key=lambda view: (view.severity, view.expected, view.id))
    run = of_run(run_json, views, sources)
    code = _exit_code(run, views)
    return PacketView(
        run=run,
        headline=_headline(views),
        counts={word: sum(view.word is word for view in views) for word in VerdictWord},
        diverged=sum(view.severity == 0 for view in views),
        unexpected=sum(not view.expected for view in views),
        exit_code=code,
        exit_meaning=EXIT_CODE_MEANING[code],
        cells=tuple(views),
        grid=_grid(views),
    )


def _headline(cells: Sequence[CellView]) -> str:
    """The one sentence that a release manager reads."""
    if not cells:
        return "This run has no cells: nothing was proven."
    passed = sum(cell.severity == 3 for cell in cells)
    if passed == len(cells):
        return "The one cell of this run is Pass." if passed == 1 else f"All {passed} cells Pass."
    parts = [_diverged_part([cell for cell in cells if cell.severity == 0])]
    refused = sum(cell.severity == 1 for cell in cells)
    other = "more Unsupported" if parts[0] else "Unsupported"
    parts.append(f"{refused} {other}" if refused else "")
    unproven = sum(cell.severity == 2 for cell in cells)
    parts.append(f"{unproven} Unproven" if unproven else "")
    return f"{passed} of {text.counted(len(cells), 'cell')} Pass; " + _sentence(parts)


def _diverged_part(diverged: Sequence[CellView]) -> str:
    if not diverged:
        return ""
    first = diverged[0]
    blame = f" ({first.blame_item})" if first.blame_item else ""
    among = "" if len(diverged) == 1 else "first "
    return f"{len(diverged)} diverged: {among}{first.address}{blame}"


def _sentence(parts: Sequence[str]) -> str:
    return "; ".join(part for part in parts if part) + "."


def _exit_code(run: RunView, cells: Iterable[CellView]) -> ExitCode:
    """What the run returned to the shell, by the same rule, from the verdicts alone."""
    codes = [ExitCode.SOURCE_CHANGED] if run.source_unchanged is False else []
    for cell in cells:
        if not cell.expected:
            refuted = cell.word is VerdictWord.UNSUPPORTED
            codes.append(ExitCode.UNSUPPORTED if refuted else ExitCode.UNPROVEN)
    return worst(*codes)


def _grid(cells: Sequence[CellView]) -> Grid:
    """Cells come worst first, so the order in which rows are met is already theirs."""
    drills = tuple(sorted({cell.drill for cell in cells}, key=_drill_order))
    rows: dict[tuple[str, str], dict[str, list[CellView]]] = {}
    for cell in cells:
        by_drill = rows.setdefault((cell.source, cell.target), {})
        by_drill.setdefault(cell.drill, []).append(cell)
    return Grid(
        drills,
        tuple(
            GridRow(
                source,
                target,
                _ranks(next(iter(found.values()))[0]),
                tuple(tuple(found.get(drill, ())) for drill in drills),
            )
            for (source, target), found in rows.items()
        ),
    )


def _ranks(view: CellView) -> str:
    if view.cell is None:
        return "–"
    return f"{view.cell.source.world_size} → {view.cell.target.world_size}"


def _drill_order(drill: str) -> tuple[bool, str]:
    """The control of all others first."""
    return drill != "baseline", drill


# --------------------------------------------------------------------------------------------------
# One cell


def _cell(stored: StoredCell, stack: Stack | None, given: JsonValue) -> CellView:
    plan = _plan(stored.plan)
    verdict = _verdict(stored, plan)
    cell = plan.cell if plan else None
    expectation = cell.expect if cell else None
    launches = _launches(plan, stored.launches) if plan and plan.cell.drilled else ()
    parts = {launch.id: launch.part for launch in launches}
    return CellView(
        id=stored.id,
        word=verdict.word,
        reason=verdict.reason,
        explanation=verdict.explanation,
        claim=verdict.claim,
        source=_place(cell.source, cell.source_environment, cell) if cell else "unknown",
        target=_place(cell.target, cell.target_environment, cell) if cell else "unknown",
        drill=cell.drill if cell else "unknown",
        parameters=_parameters(cell) if cell else (),
        planned=cell.planned if cell else False,
        blame_item=verdict.blame_item,
        blame_subject=_subject(verdict),
        next_move=verdict.next_move,
        checks=tuple(_check(check, parts) for check in verdict.checks),
        not_judged=_not_judged(verdict),
        facts=_fact_refs(verdict.facts, parts),
        expected=_expected(stored, verdict, expectation),
        expectation=expectation,
        launches=launches,
        damage=_damage(plan, stored.damage) if plan else None,
        phases=_phases(verdict.numbers),
        replay=f"cells/{stored.id}/repro.sh" if stored.replayable else None,
        repro=f"cells/{stored.id}/{REPRO_NAME}" if stored.has_repro else None,
        cell=cell,
        documented=documented.beside(stack, cell, verdict),
        points=tuple(_points(verdict)),
        manifests=tuple(manifests.of_cell(plan, stored.launches, given))
        if launches and plan
        else (),
        lines=tuple(_lines(stored.lines, parts)),
        numbers=verdict.numbers,
    )


def _plan(data: JsonValue) -> Plan | None:
    try:
        return from_json(Plan, data)
    except _NOT_A_NOUN:
        return None


def _verdict(stored: StoredCell, plan: Plan | None) -> Verdict:
    """The stored verdict, or the only one that can be given without it."""
    absent = stored.verdict is None and not any("verdict" in p for p in stored.problems)
    if stored.verdict is not None:
        with contextlib.suppress(*_NOT_A_NOUN):
            return from_json(Verdict, stored.verdict)
    return Verdict(
        cell_id=stored.id,
        claim=plan.claim if plan else Claim.CONTINUES,
        word=VerdictWord.UNPROVEN,
        reason=Reason.NOT_RUN if absent else Reason.HARNESS_ERROR,
        explanation="no verdict was stored: the cell was planned and never judged"
        if absent
        else "the stored verdict cannot be read, so it proves nothing",
        next_move="continue the run with --resume" if absent else "judge the stored run again",
    )


def _expected(stored: StoredCell, verdict: Verdict, expectation: Expectation | None) -> bool:
    """As stored beside the verdict; by the same rule where the verdict is not the stored one."""
    recorded = stored.verdict.get("expected") if isinstance(stored.verdict, Mapping) else None
    if isinstance(recorded, bool) and verdict.word == stored.verdict.get("word"):
        return recorded
    return verdict.meets(expectation)


def _subject(verdict: Verdict) -> str | None:
    """What to blame within the item; an item that is its own subject is not named twice."""
    return None if verdict.blame_subject == verdict.blame_item else verdict.blame_subject


def _place(topology: Topology, environment: str, cell: Cell) -> str:
    """`fsdp4`, `prod (fsdp4)`; with the environment when the cell changes it."""
    short = topology.short
    name = topology.name if topology.name in {short, ""} else f"{topology.name} ({short})"
    if cell.source_environment == cell.target_environment:
        return name or short
    return f"{name or short} @ {environment}"


def _check(check: Check, parts: Mapping[str, str]) -> CheckView:
    return CheckView(
        item=check.item,
        status=check.status,
        summary=check.summary,
        subjects=tuple(map(str, check.subjects)),
        details=tuple(map(str, check.details)),
        next_move=check.next_move,
        facts=_fact_refs(check.facts, parts),
        numbers=check.numbers,
    )


def _not_judged(verdict: Verdict) -> tuple[Item, ...]:
    """Items without a row, where there are rows at all. Two have one under one claim only."""
    if not verdict.checks:
        return ()
    only = {Item.DAMAGE: Claim.DETECTS_DAMAGE, Item.GENERATION: Claim.KEEPS_A_GENERATION}
    optional = {item for item, claim in only.items() if verdict.claim is not claim}
    judged = {check.item for check in verdict.checks}
    return tuple(item for item in Item if item not in judged | optional)


def _fact_refs(refs: Iterable[JsonValue], parts: Mapping[str, str]) -> tuple[FactRef, ...]:
    return tuple(
        FactRef(ref, text.link_target(ref), _fact_label(ref, parts)) for ref in map(str, refs)
    )


def _lines(
    heads: Mapping[str, str], parts: Mapping[str, str]
) -> Iterator[tuple[FactRef, CitedLine]]:
    for fact in _fact_refs(heads, parts):
        shown = lines.line(heads[fact.ref])
        if shown is not None:
            yield fact, shown


def _fact_label(ref: str, parts: Mapping[str, str]) -> str:
    found = _RANK_FACT.fullmatch(ref)
    if found is None:
        return ref.removeprefix("launches/")
    return f"{parts.get(found[1], found[1])} {found[2]}:{found[3]}"


def _launches(plan: Plan, begun: Mapping[str, JsonValue]) -> tuple[LaunchView, ...]:
    """Every launch once, under the first part that it plays."""
    parts: dict[str, tuple[str, Launch]] = {}
    baseline = "restore" if plan.baseline.id == plan.restore.id else "baseline"
    named: list[tuple[str, Launch | None]] = [
        ("source", plan.source),
        *(("repeat", launch) for launch in plan.repeats),
        ("other stream", plan.other_stream),
        ("control", plan.control),
        ("recording", plan.replay.recorded if plan.replay else None),
        ("recording", plan.replay.again if plan.replay else None),
        (baseline, plan.baseline),
        *(("failing", launch) for launch in plan.failing),
        ("intact", plan.intact),
        ("stalled", plan.stalled),
        *(("restore", launch) for launch in plan.generations),
        ("restore", plan.restore),
    ]
    for part, launch in named:
        if launch is not None:
            parts.setdefault(launch.id, (part, launch))
    return tuple(_launch(part, each, begun.get(each.id)) for part, each in parts.values())


def _launch(part: str, launch: Launch, begun: JsonValue) -> LaunchView:
    restores = launch.restores
    about = begun if isinstance(begun, Mapping) else {}
    damaged = " (damaged copy)" if restores and restores.damage_id else ""
    if restores and restores.state:
        damaged = f" (state {restores.state})"
    return LaunchView(
        part=part,
        id=launch.id,
        topology=launch.topology.short,
        environment=launch.environment,
        stop_step=launch.stop_step,
        restores=f"step {restores.step} of {restores.launch_id}{damaged}" if restores else "",
        launcher=text.recorded(about.get("launcher")),
        guard=_launch_guard(about),
        ranks=launch.topology.world_size,
        begun=bool(about),
    )


def _launch_guard(about: Mapping[str, JsonValue]) -> str:
    bound, refused = (about.get(key) for key in BOUND)
    return guard_in_words(
        text.recorded(about.get("guard")), text.recorded(refused), bound=bool(bound)
    )


def _points(verdict: Verdict) -> Iterator[PointView]:
    """The points of interruption of a verdict; what is not of their shape is left out."""
    rows = [c.numbers.get("points") for c in verdict.checks if c.item is Item.GENERATION]
    for row in rows[0] if rows and isinstance(rows[0], list) else ():
        with contextlib.suppress(*_NOT_A_NOUN):
            held = row["files"]
            yield PointView(
                id=str(row["id"]),
                where=f"event {row['event']}: {row['where']}",
                kept=str(row["class"]),
                steps_lost=row["steps_lost"],
                pieces=f"{held['old']} old, {held['new']} new" if held["old"] else "",
                confirmed=bool(row["confirmed"]),
                why=str(row["why"]),
            )


def _damage(plan: Plan, record: JsonValue) -> DamageView | None:
    if plan.damage is None:
        return None
    about = record if isinstance(record, Mapping) else {}
    files = about.get("files", [about] if about else [])
    return DamageView(
        id=plan.damage.id,
        kind=" ".join(
            (plan.damage.kind, *([text.recorded(about["lie"])] if "lie" in about else []))
        ),
        guard=text.recorded(about.get("guard")),
        files=tuple(_damaged_file(file) for file in files if isinstance(file, Mapping)),
    )


def _damaged_file(record: Mapping[str, JsonValue]) -> DamagedFile:
    return DamagedFile(
        file=text.recorded(record.get("file") or record.get("path")),
        before=text.recorded(record.get("sha256_before") or record.get("before")),
        after=text.recorded(record.get("sha256_after") or record.get("after")),
    )


def _parameters(cell: Cell) -> tuple[tuple[str, str], ...]:
    """What tells cells of one drill apart, its conversion included."""
    own = tuple(text.flatten(cell.parameters)) if cell.parameters else ()
    return own if cell.conversion is None else (*own, ("conversion", cell.conversion))


def _phases(numbers: Mapping[str, JsonValue]) -> Phases | None:
    found = numbers.get("phases")
    if not isinstance(found, Mapping):
        return None
    merged = found.get("merged")
    wall_s = numbers.get("wall_s")
    known = (CONVERSION, *PHASES)
    measured = tuple((name, found[name]) for name in known if text.is_number(found.get(name)))
    return Phases(
        seconds=measured,
        missing=tuple(name for name in PHASES if name not in dict(measured)),
        merged=tuple(map(str, merged)) if isinstance(merged, list) else (),
        wall_s=wall_s if text.is_number(wall_s) else None,
    )
