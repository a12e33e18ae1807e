"""The ledger of a run, laid out for the page: what each restore took, and what is trained again.

Pure. Restores are those that the verdicts have times for, slowest first: the phases as bars on one
common scale, the seconds that a production job pays (without the drill's own fingerprinting), and
the hours that it occupies on all ranks together. Where a drill lost steps, replay is lost steps
times the measured seconds per step. Memory and durable storage give back different steps at
different speeds, so their recovery point and time stand apart. The sums are those of
`ckptdrill.ledger`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptdrill.ledger import Restored
from ckptdrill.model import JsonValue
from ckptdrill.packet import text
from ckptdrill.packet.plots import Bar
from ckptdrill.packet.view import CellView, PacketView

MOST_ROWS = 40


@dataclass(frozen=True)
class Row:
    """What one restore took. Bars are in percent of the slowest one; texts are `–` where nothing
    was measured.
    """

    cell: CellView
    ranks: int
    bars: tuple[Bar, ...]
    restore: str
    occupied: str
    step: str
    lost_steps: str
    replay: str


@dataclass(frozen=True)
class Tier:
    """What one tier gave back after a failure: how far back, how fast."""

    point: str
    time: str


@dataclass(frozen=True)
class Recovery:
    """The same failure recovered with the memory tier intact, and from durable storage."""

    cell: CellView
    memory: Tier
    durable: Tier


@dataclass(frozen=True)
class Ledger:
    """All rows of a run. `more` restores are left out of `rows`."""

    rows: tuple[Row, ...]
    more: int
    recoveries: tuple[Recovery, ...]
    phases: tuple[str, ...]
    notes: tuple[str, ...]


def of_packet(view: PacketView) -> Ledger:
    """The ledger of a packet; without rows where no restore was timed."""
    timed = [(cell, each) for cell in view.cells if (each := _restored(cell)) is not None]
    unit = "GPU-h" if _has_gpus(view) else "rank-h"
    timed.sort(key=lambda pair: (-pair[1].restore_s, pair[0].id))
    whole_s = max((sum(each.phases_s.values()) for _, each in timed), default=0.0)
    return Ledger(
        rows=tuple(_row(cell, each, whole_s, unit) for cell, each in timed[:MOST_ROWS]),
        more=max(0, len(timed) - MOST_ROWS),
        recoveries=tuple(_recoveries(timed))[:MOST_ROWS],
        phases=tuple(dict.fromkeys(name for _, each in timed for name in each.phases_s)),
        notes=tuple(_notes(each for _, each in timed)),
    )


def _has_gpus(view: PacketView) -> bool:
    node = view.run.raw.get("node")
    return bool(isinstance(node, Mapping) and node.get("gpus"))


def _restored(cell: CellView) -> Restored | None:
    if cell.phases is None or not cell.phases.seconds or cell.cell is None:
        return None
    step_s, tiers = cell.numbers.get("step_s"), cell.numbers.get("tiers")
    return Restored(
        cell=cell.id,
        planned=cell.planned,
        ranks=cell.cell.target.world_size,
        phases_s=dict(cell.phases.seconds),
        merged=cell.phases.merged,
        step_s=step_s if text.is_number(step_s) else None,
        tiers=tiers if isinstance(tiers, Mapping) else {},
    )


def _row(cell: CellView, each: Restored, whole_s: float, unit: str) -> Row:
    lost = _lost_steps(cell)
    replay_s = None if lost is None or each.step_s is None else lost * each.step_s
    return Row(
        cell=cell,
        ranks=each.ranks,
        bars=tuple(_bars(each, whole_s)),
        restore=text.seconds(each.restore_s),
        occupied=f"{each.ranks * each.restore_s / 3600:.3g} {unit}",
        step="–" if each.step_s is None else text.seconds(each.step_s),
        lost_steps="–" if lost is None else text.number(lost),
        replay="–" if replay_s is None else text.seconds(replay_s),
    )


def _bars(each: Restored, whole_s: float) -> Iterator[Bar]:
    at_s = 0.0
    for name, duration_s in each.phases_s.items():
        x, width = (round(100 * s / whole_s, 2) if whole_s else 0.0 for s in (at_s, duration_s))
        yield Bar(name, x, width, text.seconds(duration_s))
        at_s += duration_s


def _lost_steps(cell: CellView) -> float | None:
    """Steps to be trained again after the failure that a cell drills; None where none was."""
    lost = [cell.numbers.get("replayed_steps")]
    for part, key in (("storage", "lost_steps"), ("tiers", "after_loss")):
        told = cell.numbers.get(part)
        found = told.get(key) if isinstance(told, Mapping) else None
        lost.append(found.get("steps_lost") if isinstance(found, Mapping) else found)
    lost += [point.steps_lost for point in cell.points]
    return max((steps for steps in lost if text.is_number(steps)), default=None)


def _recoveries(timed: Iterable[tuple[CellView, Restored]]) -> Iterator[Recovery]:
    for cell, each in timed:
        if each.tiers:
            memory, durable = (each.tiers.get(key) for key in ("memory", "after_loss"))
            yield Recovery(cell, _tier(memory, each.step_s), _tier(durable, each.step_s))


def _tier(told: JsonValue, step_s: float | None) -> Tier:
    if not isinstance(told, Mapping):
        return Tier("–", "–")
    return Tier(_point(told, step_s), _time(told))


def _point(told: Mapping[str, JsonValue], step_s: float | None) -> str:
    """`step 12: 2 steps, 0.0345 s of training lost`."""
    lost = told.get("steps_lost")
    if not text.is_number(lost):
        return "not recovered"
    of_training = f", {text.seconds(lost * step_s)} of training" if step_s is not None else ""
    return f"step {text.number(told.get('step'))}: {text.counted(int(lost), 'step')}{of_training}"


def _time(told: Mapping[str, JsonValue]) -> str:
    recovery_s = told.get("recovery_s")
    return text.seconds(recovery_s) if text.is_number(recovery_s) else "not recovered"


def _notes(timed: Iterable[Restored]) -> Iterator[str]:
    """What could not be told apart, said once where it is the same everywhere."""
    merged = {each.merged for each in timed if each.merged}
    for names in sorted(merged):
        yield f"measured together in one load call: {', '.join(names)}"
