"""Geometry of the plots: numbers of a verdict to coordinates, which a template draws. Pure.

A plot exists only where its numbers do. A value that is not finite leaves a gap in its line and a
note beside it, since `nan` is what people most want to see; long windows are thinned, and say so.
Coordinates are in pixels of a fixed view box and rounded to a tenth, which keeps a page small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptdrill.ledger import PHASES
from ckptdrill.model import Item, JsonValue
from ckptdrill.packet import text
from ckptdrill.packet.view import CellView, Phases

WIDTH = 340
HEIGHT = 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 8, 8, 22
_MOST_POINTS = 200
_MOST_GROUPS = 4
_MOST_STEPS = 240

Series = list[float | None]


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and what stands there."""

    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """One series: `style` is `reference`, `restored` or `limit`; segments are polyline points.

    `dots` is a path of empty strokes, of which round caps make one dot per step.
    """

    style: str
    segments: tuple[str, ...]
    dots: str


@dataclass(frozen=True)
class LinePlot:
    """A line plot over steps. `band` is a closed outline, empty where there is none."""

    title: str
    lines: tuple[Line, ...]
    band: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class StripStep:
    """The global batch of one step. `state` is held, missing, repeated, foreign or reordered."""

    step: str
    state: str
    mark: str
    meaning: str


@dataclass(frozen=True)
class Strip:
    """The batches of the window, step by step."""

    steps: tuple[StripStep, ...]
    summary: str


@dataclass(frozen=True)
class Bar:
    """One part of a stacked bar; offsets and widths in percent."""

    name: str
    x: float
    width: float
    label: str


@dataclass(frozen=True)
class PhaseBar:
    """Restore phases, one after the other."""

    bars: tuple[Bar, ...]
    total: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class UpdateRow:
    """How one update compares with the reference's."""

    name: str
    cosine: str
    norm_ratio: str


@dataclass(frozen=True)
class Updates:
    """The first update, of all parameters together and of those furthest from the reference."""

    whole: UpdateRow
    rows: tuple[UpdateRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Plots:
    """All that one cell has to draw."""

    lines: tuple[LinePlot, ...]
    strip: Strip | None
    updates: Updates | None
    phases: PhaseBar | None

    @property
    def any(self) -> bool:
        """True when there is something to draw."""
        return bool(self.lines or self.strip or self.updates or self.phases)


def of_cell(cell: CellView) -> Plots:
    """The plots for which the verdict of `cell` carries numbers."""
    numbers = {check.item: check.numbers for check in cell.checks if check.numbers}
    loss, schedule = numbers.get(Item.LOSS, {}), numbers.get(Item.SCHEDULER, {})
    lines = (_loss(loss), _deviation(loss), _learning_rate(schedule))
    return Plots(
        lines=tuple(plot for plot in lines if plot is not None),
        strip=_strip(numbers.get(Item.DATA, {})),
        updates=_updates(numbers.get(Item.UPDATES, {})),
        phases=_phase_bar(cell.phases) if cell.phases and cell.phases.seconds else None,
    )


# --------------------------------------------------------------------------------------------------
# Lines


def _loss(numbers: Mapping[str, JsonValue]) -> LinePlot | None:
    """Restored over reference, with the band that is allowed around the reference."""
    steps, reference, restored = (
        _series(numbers.get(key)) for key in ("steps", "reference", "restored")
    )
    if not steps or not (reference or restored):
        return None
    band = numbers.get("band")
    notes = [f"not finite at step {text.number(step)}" for step in _gaps(steps, restored)[:3]]
    edges: list[Series] = []
    if text.is_number(band):
        edges = [
            [None if y is None else y + sign * float(band) * abs(y) for y in reference]
            for sign in (1, -1)
        ]
    named = [("reference", reference), ("restored", restored)]
    return _line_plot("Loss", steps, named, edges, notes)


def _deviation(numbers: Mapping[str, JsonValue]) -> LinePlot | None:
    """Relative deviation of the loss against its band: the curves themselves overlap."""
    steps, deviation = _series(numbers.get("steps")), _series(numbers.get("deviation"))
    found = [abs(y) for y in deviation if y is not None]
    if not steps or not found:
        return None
    sizes: Series = [None if y is None else abs(y) for y in deviation]
    band = numbers.get("band")
    named = [("restored", sizes)]
    notes = [f"largest {text.number(max(found))}"]
    if text.is_number(band):
        named.append(("limit", [float(band)] * len(steps)))
        origin = numbers.get("band_from")
        notes.append(f"band {text.number(band)}" + (f", from {origin}" if origin else ""))
    return _line_plot("Loss deviation from the reference, relative", steps, named, [], notes)


def _learning_rate(numbers: Mapping[str, JsonValue]) -> LinePlot | None:
    steps = _series(numbers.get("steps"))
    named = [
        (style, group)
        for style in ("reference", "restored")
        for group in _groups(numbers.get(style))[:_MOST_GROUPS]
    ]
    if not steps or not named:
        return None
    total = max(len(_groups(numbers.get(style))) for style in ("reference", "restored"))
    notes = [f"{_MOST_GROUPS} of {total} groups drawn"] if total > _MOST_GROUPS else []
    return _line_plot("Learning rate", steps, named, [], notes)


def _line_plot(
    title: str,
    steps: Series,
    named: Sequence[tuple[str, Series]],
    edges: Sequence[Series],
    notes: Sequence[str],
) -> LinePlot | None:
    xs = [x for x in steps if x is not None]
    ys = [y for series in (*(s for _, s in named), *edges) for y in series if y is not None]
    if not xs or not ys:
        return None
    scale = _Scale.around(xs, ys)
    upper, lower = ([scale.points(steps, edge) for edge in edges] or [[], []])[:2]
    outline = [p for p in upper if p] + [p for p in reversed(lower) if p]
    thinned = [f"every {_stride(steps)}th step drawn"] if _stride(steps) > 1 else []
    return LinePlot(
        title=title,
        lines=tuple(_line(style, scale.points(steps, series)) for style, series in named),
        band=_polyline(outline),
        x_ticks=scale.x_ticks(steps),
        y_ticks=scale.y_ticks(),
        notes=(*notes, *thinned),
    )


Point = tuple[float, float]


def _line(style: str, points: Sequence[Point | None]) -> Line:
    """Segments between gaps. A point between two gaps shows as a dot only."""
    segments: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            segments.append([])
        else:
            segments[-1].append(point)
    dotted = style == "restored" and len(points) <= 40
    return Line(
        style=style,
        segments=tuple(_polyline(segment) for segment in segments if len(segment) > 1),
        dots="".join(f"M{p[0]:g},{p[1]:g}h0" for p in points if p) if dotted else "",
    )


def _polyline(points: Sequence[Point]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


@dataclass(frozen=True)
class _Scale:
    """Steps and values to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> _Scale:
        """All of it visible, with some air above and below; a flat line runs through the middle."""
        low, high = min(ys), max(ys)
        air = (high - low) * 0.08 or abs(high) * 0.5 or 1.0
        return cls(min(xs), max(xs), low if low == 0 < high else low - air, high + air)

    def x(self, value: float) -> float:
        """Pixels from the left."""
        span = self.x_high - self.x_low
        part = (value - self.x_low) / span if span else 0.5
        return round(_LEFT + part * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        part = (value - self.y_low) / (self.y_high - self.y_low)
        return round(HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM), 1)

    def points(self, steps: Series, values: Series) -> list[Point | None]:
        """A point per drawn step, None where there is nothing to draw."""
        pairs = list(zip(steps, values, strict=False))[:: _stride(steps)]
        return [None if x is None or y is None else (self.x(x), self.y(y)) for x, y in pairs]

    def x_ticks(self, steps: Series) -> tuple[Tick, ...]:
        """First, middle and last step."""
        found = [step for step in steps if step is not None]
        chosen = sorted({found[0], found[len(found) // 2], found[-1]})
        return tuple(Tick(self.x(step), f"{step:g}") for step in chosen)

    def y_ticks(self) -> tuple[Tick, ...]:
        """Two to four round values."""
        span = self.y_high - self.y_low
        unit = 10.0 ** math.floor(math.log10(span / 3))
        unit *= next(m for m in (1, 2, 5, 10) if span / (unit * m) <= 4)
        first = math.ceil(self.y_low / unit)
        last = math.floor(self.y_high / unit)
        digits = max(0, -math.floor(math.log10(unit)))
        return tuple(
            Tick(self.y(n * unit), _tick_label(n * unit, digits)) for n in range(first, last + 1)
        )


def _tick_label(value: float, digits: int) -> str:
    if digits <= 4:
        return f"{value:.{digits}f}"
    return f"{value:.1e}" if value else "0"


def _stride(steps: Sequence[object]) -> int:
    return max(1, math.ceil(len(steps) / _MOST_POINTS))


def _series(value: JsonValue) -> Series:
    """Numbers, with None in place of what is no finite number; empty for what is no list."""
    if not isinstance(value, list):
        return []
    return [float(item) if text.is_number(item) else None for item in value]


def _groups(value: JsonValue) -> list[Series]:
    """[[value per group] per step] to one series per group; a plain list is a single group."""
    if not isinstance(value, list) or not value:
        return []
    rows = [row if isinstance(row, list) else [row] for row in value]
    width = max(map(len, rows))
    return [_series([row[g] if g < len(row) else None for row in rows]) for g in range(width)]


def _gaps(steps: Series, values: Series) -> list[float]:
    pairs = zip(steps, values, strict=False)
    return [step for step, value in pairs if step is not None and value is None]


# --------------------------------------------------------------------------------------------------
# Batches, updates, phases


def _strip(numbers: Mapping[str, JsonValue]) -> Strip | None:
    steps = numbers.get("steps")
    if not isinstance(steps, list) or not steps:
        return None
    drawn = [_strip_step(numbers, index, step) for index, step in enumerate(steps[:_MOST_STEPS])]
    wrong = sum(step.state != "held" for step in drawn)
    summary = f"{wrong} of {text.counted(len(drawn), 'step')} differ" if wrong else "all as planned"
    if len(steps) > len(drawn):
        summary += f"; first {len(drawn)} of {len(steps)} steps drawn"
    return Strip(tuple(drawn), summary)


def _strip_step(numbers: Mapping[str, JsonValue], index: int, step: JsonValue) -> StripStep:
    missing, repeated, foreign, reordered, size = (
        _at(numbers, key, index)
        for key in ("missing", "repeated", "foreign", "reordered", "global_batch")
    )
    found = [
        (int(missing), "missing", f"−{missing:g}"),
        (int(repeated), "repeated", f"+{repeated:g}"),
        (int(foreign), "foreign", f"?{foreign:g}"),
    ]
    wrong = [part for part in found if part[0]]
    of = f" of {size:g}" if size else ""
    if wrong:
        meaning = ", ".join(f"{count}{of} {state}" for count, state, _ in wrong)
        return StripStep(text.number(step), wrong[0][1], wrong[0][2], meaning)
    if reordered:
        return StripStep(text.number(step), "reordered", "⇄", "same samples, re-ordered")
    return StripStep(text.number(step), "held", "✓", "as in the reference")


def _at(numbers: Mapping[str, JsonValue], key: str, index: int) -> float:
    values = numbers.get(key)
    if not isinstance(values, list) or index >= len(values):
        return 0
    value = values[index]
    return float(value) if isinstance(value, bool) or text.is_number(value) else 0


def _updates(numbers: Mapping[str, JsonValue]) -> Updates | None:
    cosine, ratio = numbers.get("cosine"), numbers.get("norm_ratio")
    if not text.is_number(cosine) and not text.is_number(ratio):
        return None
    furthest = numbers.get("furthest")
    rows = tuple(
        UpdateRow(str(name), _fixed(pair[0]), _fixed(pair[1]))
        for name, pair in (furthest.items() if isinstance(furthest, Mapping) else ())
        if isinstance(pair, list) and len(pair) == 2
    )
    notes = [f"step {text.number(numbers['step'])}"] if text.is_number(numbers.get("step")) else []
    if text.is_number(numbers.get("distance")) and text.is_number(numbers.get("band")):
        far, band = text.number(numbers["distance"]), text.number(numbers["band"])
        notes.append(f"relative distance {far}, band {band}")
    return Updates(UpdateRow("all parameters", _fixed(cosine), _fixed(ratio)), rows, tuple(notes))


def _fixed(value: JsonValue) -> str:
    """Five places: a cosine of 0.99996 must not read as 1."""
    return f"{value:.5f}" if text.is_number(value) else "–"


def _phase_bar(phases: Phases) -> PhaseBar:
    total_s = sum(duration_s for _, duration_s in phases.seconds)
    bars: list[Bar] = []
    offset = 0.0
    for name, duration_s in phases.seconds:
        width = 100 * duration_s / total_s if total_s else 0.0
        bars.append(Bar(name, round(offset, 2), round(width, 2), text.seconds(duration_s)))
        offset += width
    told = " ".join(phases.merged)
    missing = [name for name in phases.missing if name not in told]
    together = all(part in PHASES for part in phases.merged)
    notes = [f"measured together: {', '.join(phases.merged)}"] if told and together else []
    notes += [] if together else phases.merged
    notes += [f"not measured: {', '.join(missing)}"] if missing else []
    notes += [f"wall time of the restore {text.seconds(phases.wall_s)}"] if phases.wall_s else []
    return PhaseBar(tuple(bars), text.seconds(total_s), tuple(notes))
