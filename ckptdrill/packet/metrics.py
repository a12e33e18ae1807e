"""`metrics.prom`: what a run measured, in OpenMetrics text, for node_exporter's textfile collector.

Pure. A metric without a measurement is left out: an absent series is seen by an alert, an invented
zero is not. The names are those of the restore contract. What alerts should watch is the age of the
newest resume point that was committed *and* restored in a drill that passed; since a file at rest
has no clock, its time is given beside the age that it had when the run ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest

from ckptdrill.model import Claim, Item, JsonValue, Reason, VerdictWord
from ckptdrill.packet import text
from ckptdrill.packet.view import CellView, PacketView

# Reasons with which a restore itself ends; a reason such as `not-run` says nothing of a restore.
_FAILED = (
    Reason.REFUSED,
    Reason.CRASHED,
    Reason.HUNG,
    Reason.TIMED_OUT,
    Reason.DIVERGED,
    Reason.BATCH_PLAN,
    Reason.TRAINS_OTHERWISE,
)
_LABELS = ("matrix", "cell")


def render(view: PacketView) -> str:
    """The text of metrics.prom."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(view))
    written: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return written.decode()


class _Collected:
    """The one collector of the file, in the form that the registry asks for."""

    def __init__(self, view: PacketView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Every metric that has a value."""
        for metric in _metrics(self._view):
            if metric.samples:
                yield metric


def _metrics(view: PacketView) -> Iterator[Metric]:
    continuing = [cell for cell in _in_order(view) if cell.claim == Claim.CONTINUES]
    yield _save_metric(
        view,
        "checkpoint_save_duration_seconds",
        "Seconds that the job waited for the save under drill, slowest rank",
        staged=False,
    )
    yield _save_metric(
        view,
        "checkpoint_async_staging_seconds",
        "Seconds until an asynchronous save came back to the job, slowest rank",
        staged=True,
    )
    yield _restore_duration(view)
    yield _failures(view, continuing)
    yield _reprocessed(view)
    yield _loss_delta(view, continuing)
    yield _size_changes(view, continuing)
    yield from _resume_point(view, continuing)


def _in_order(view: PacketView) -> list[CellView]:
    return sorted(view.cells, key=lambda cell: cell.id)


def _gauge(name: str, about: str, labels: Sequence[str] = _LABELS) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=labels)


def _named(view: PacketView, cell: CellView) -> list[str]:
    return [text.visible(view.run.matrix), cell.id]


def _save_metric(view: PacketView, name: str, about: str, *, staged: bool) -> Metric:
    metric = _gauge(name, about)
    for cell in _in_order(view):
        save = _save(cell)
        is_staged = save.get("call") == "async_save"
        if text.is_number(duration_s := save.get("duration_s")) and is_staged is staged:
            metric.add_metric(_named(view, cell), duration_s)
    return metric


def _save(cell: CellView) -> dict[str, JsonValue]:
    save = cell.numbers.get("save")
    return dict(save) if isinstance(save, dict) else {}


def _restore_duration(view: PacketView) -> Metric:
    about = "Wall seconds from the start of the processes to the first batch, without validation"
    metric = _gauge("checkpoint_restore_duration_seconds", about)
    for cell in _in_order(view):
        if cell.phases and cell.phases.seconds:
            spent_s = sum(value for name, value in cell.phases.seconds if name != "validate")
            metric.add_metric(_named(view, cell), spent_s)
    return metric


def _failures(view: PacketView, cells: Sequence[CellView]) -> Metric:
    about = "Restores of undamaged checkpoints in this run that did not continue the training"
    metric = CounterMetricFamily("checkpoint_restore_failures", about, labels=("matrix", "reason"))
    counts = Counter(cell.reason for cell in cells if cell.reason in _FAILED)
    for reason, count in sorted(counts.items()):
        metric.add_metric([text.visible(view.run.matrix), reason], count)
    return metric


def _reprocessed(view: PacketView) -> Metric:
    """Replayed steps times the global batch, where every compared step had the same one."""
    about = "Samples trained again after falling back to older checkpoints in this run"
    metric = CounterMetricFamily("checkpoint_reprocessed_samples", about, labels=_LABELS)
    for cell in _in_order(view):
        steps = cell.numbers.get("replayed_steps")
        rows = [check for check in cell.checks if check.item is Item.DATA]
        found = rows[0].numbers.get("global_batch") if rows else None
        sizes = found if isinstance(found, list) else []
        known = {size for size in sizes if text.is_number(size)}
        if text.is_number(steps) and len(known) == 1 and all(map(text.is_number, sizes)):
            metric.add_metric(_named(view, cell), steps * known.pop())
    return metric


def _loss_delta(view: PacketView, cells: Sequence[CellView]) -> Metric:
    about = "Largest relative deviation of the loss from the reference over the compared steps"
    metric = _gauge("resume_loss_delta", about)
    for cell in cells:
        rows = [check for check in cell.checks if check.item is Item.LOSS]
        found = rows[0].numbers.get("deviation") if rows else None
        numbers = [n for n in found if text.is_number(n)] if isinstance(found, list) else []
        if numbers:
            metric.add_metric(_named(view, cell), max(numbers))
    return metric


def _size_changes(view: PacketView, cells: Sequence[CellView]) -> Metric:
    about = "Restores in this run at another world size that continued the training"
    metric = CounterMetricFamily("resume_world_size_change", about, labels=("matrix",))
    changed = [
        cell
        for cell in cells
        if cell.cell is not None and cell.cell.source.world_size != cell.cell.target.world_size
    ]
    if changed:
        passed = sum(cell.word is VerdictWord.PASS for cell in changed)
        metric.add_metric([text.visible(view.run.matrix)], passed)
    return metric


def _resume_point(view: PacketView, cells: Sequence[CellView]) -> Iterator[Metric]:
    """The newest checkpoint of this run that was committed and that a passed cell restored."""
    step = _gauge(
        "checkpoint_last_committed_step", "Step of the newest drill-validated save", ("matrix",)
    )
    saved_at = _gauge(
        "checkpoint_drill_validated_timestamp_seconds",
        "Unix time of the newest resume point that was committed and drill-validated",
        ("matrix",),
    )
    age = _gauge(
        "checkpoint_drill_validated_age_seconds",
        "Its age when the run ended; for alerts use time() minus the timestamp",
        ("matrix",),
    )
    newest = _newest(cells) if view.run.source_unchanged is True else None
    ended_s = _unix_s(view.run.ended_utc)
    # A save after the end of its run: the clock was put back, and would never let it grow old.
    if newest is not None and (ended_s is None or ended_s >= newest[0]):
        name = [text.visible(view.run.matrix)]
        step.add_metric(name, newest[1])
        saved_at.add_metric(name, newest[0])
        if ended_s is not None:
            age.add_metric(name, ended_s - newest[0])
    yield from (step, saved_at, age)


def _newest(cells: Sequence[CellView]) -> tuple[float, int] | None:
    """(unix time, step) of the newest synchronous save that a passed cell restored."""
    found = [
        (float(ended_s), int(step))
        for cell in cells
        if cell.word is VerdictWord.PASS and _save(cell).get("call") != "async_save"
        if text.is_number(ended_s := _save(cell).get("ended_s"))
        if text.is_number(step := _save(cell).get("step"))
    ]
    return max(found, default=None)


def _unix_s(utc: str) -> float | None:
    try:
        return datetime.fromisoformat(utc).timestamp()
    except ValueError:
        return None
