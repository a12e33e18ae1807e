"""The metrics of nightly runs, across runs, for node_exporter's textfile collector. Pure.

`metrics.prom` of a packet speaks of one run, and lacks a resume point where that run proved none.
What alerts need is the newest one of any run. Everything with a time is given as a unix time and
not as an age: a file that is no longer written then grows old by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from ckptdrill.errors import ExitCode
from ckptdrill.history import PastRun, ResumePoint
from ckptdrill.model import Reason


def render(
    matrix: str,
    point: ResumePoint | None,
    newest: PastRun | None,
    code: ExitCode,
    ended_s: float,
) -> str:
    """The text of the file, in the format that the collector reads. A point that there is not has
    no series: alert on that with absent().
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(_metrics(matrix, point, newest, code, ended_s))))
    return generate_latest(registry).decode()


class _Collected:
    """The one collector of the file, in the form that the registry asks for."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Every metric that has a value."""
        return (metric for metric in self._metrics if metric.samples)


def _metrics(
    matrix: str,
    point: ResumePoint | None,
    newest: PastRun | None,
    code: ExitCode,
    ended_s: float,
) -> Iterator[Metric]:
    validated = _gauge(
        "checkpoint_drill_validated_timestamp_seconds",
        "Unix time of the newest resume point that was committed and drill-validated, of any run",
    )
    step = _gauge("checkpoint_last_committed_step", "Its step")
    if point is not None:
        validated.add_metric([matrix], point.saved_s)
        step.add_metric([matrix], point.step)
    yield from (validated, step)
    ended = _gauge("ckptdrill_nightly_end_timestamp_seconds", "Unix time at which it last ended")
    ended.add_metric([matrix], ended_s)
    exit_code = _gauge("ckptdrill_nightly_exit_code", "Its exit code")
    exit_code.add_metric([matrix], int(code))
    yield from (ended, exit_code)
    if newest is not None:
        yield _cells(matrix, newest)


def _cells(matrix: str, newest: PastRun) -> Metric:
    about = "Cells of the newest run by verdict; not_run ones are Unproven, and counted apart"
    metric = GaugeMetricFamily("ckptdrill_nightly_cells", about, labels=("matrix", "verdict"))
    counts = Counter(
        "not_run" if outcome.reason is Reason.NOT_RUN else outcome.word.value.lower()
        for outcome in newest.outcomes
    )
    for word in ("pass", "unsupported", "unproven", "not_run"):
        metric.add_metric([matrix, word], counts[word])
    return metric


def _gauge(name: str, about: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=("matrix",))
