"""What a packet says of the run itself: where, with what, whether its sources stayed as they were.

Pure, as `view`, of which this is the part on run.json and sources.json. A run that stopped early
records little: what is missing is named, and what has another shape is left out.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptdrill.claims import Stack
from ckptdrill.model import JsonValue
from ckptdrill.packet import documented, text

if TYPE_CHECKING:
    from ckptdrill.packet.view import CellView

_RECORDED = ("versions", "environments", "node", "source_unchanged")
_ENVIRONMENT_COLUMNS = ("python", "torch", "cuda")
_OTHER_SHAPE = (TypeError, ValueError, KeyError, IndexError, AttributeError)


@dataclass(frozen=True)
class Section:
    """A titled list of names and values, as recorded."""

    title: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SourceView:
    """A checkpoint that was restored: what was compared before and after, and what differed.

    `unchanged` is None where it was not read again.
    """

    path: str
    of: str
    files: int
    size_bytes: int
    unchanged: bool | None
    changes: tuple[str, ...]


@dataclass(frozen=True)
class RunView:
    """The run itself: where, with what, and whether its source stayed as it was.

    `rests_on` is the code that ran, `drilled_with` what all cells have in common: framework,
    precision, storage.
    """

    matrix: str
    status: str
    started_utc: str
    ended_utc: str
    wall_s: float | None
    command: str
    rests_on: tuple[tuple[str, str], ...]
    drilled_with: tuple[tuple[str, str], ...]
    source_unchanged: bool | None
    source_changes: tuple[str, ...]
    launcher: str
    guard: str
    sources: tuple[SourceView, ...]
    sections: tuple[Section, ...]
    environment_columns: tuple[str, ...]
    environments: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...]
    raw: Mapping[str, JsonValue] = field(repr=False)
    stack: Stack | None = None


def of_run(
    about: Mapping[str, JsonValue], cells: Sequence[CellView], sources: JsonValue
) -> RunView:
    """What run.json and sources.json say of the run that has these cells."""
    started, ended = (text.recorded(about.get(key)) for key in ("started_utc", "ended_utc"))
    launcher, guard = _launcher(about), _guard(about, cells)
    unwritten = [name for name, found in (("launcher", launcher), ("guard", guard)) if not found]
    unchanged = about.get("source_unchanged")
    columns, rows = _environments(about.get("environments"), about.get("installed"))
    argv = about.get("argv")
    return RunView(
        matrix=text.recorded(about.get("matrix")) or "(unnamed matrix)",
        status=text.recorded(about.get("status")) or "unknown",
        started_utc=started,
        ended_utc=ended,
        wall_s=about["took_s"]
        if text.is_number(about.get("took_s"))
        else text.between_s(started, ended),
        command=shlex.join(map(str, argv)) if isinstance(argv, list) else "",
        rests_on=tuple(_rests_on(about)),
        drilled_with=tuple(_drilled_with(about, cells)),
        source_unchanged=unchanged if isinstance(unchanged, bool) else None,
        source_changes=_texts(about.get("source_changes")),
        launcher=launcher,
        guard=guard,
        sources=_sources(sources),
        sections=_sections(about),
        environment_columns=columns,
        environments=rows,
        missing=(*(key for key in _RECORDED if about.get(key) in (None, {}, "")), *unwritten),
        raw=about,
        stack=documented.stack_of(about.get("stack")),
    )


def _rests_on(about: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    """The training code and its image, by digest, as far as they are recorded."""
    program = text.recorded(about.get("program")).rpartition("/")[2]
    for name, value in (
        ("training script", program),
        ("its sha256", text.recorded(about.get("program_sha256"))),
        ("code version", text.recorded(about.get("git_head"))),
        ("image", text.recorded(about.get("image_digest")) or "not recorded"),
    ):
        if value:
            yield name, value


def _drilled_with(
    about: Mapping[str, JsonValue], cells: Sequence[CellView]
) -> Iterator[tuple[str, str]]:
    stack = documented.stack_of(about.get("stack"))
    environments = about.get("environments")
    versions = environments.values() if isinstance(environments, Mapping) else ()
    torch = {text.recorded(each.get("torch")) for each in versions if isinstance(each, Mapping)}
    node = about.get("node")
    storage = node.get("storage") if isinstance(node, Mapping) else None
    for name, found in (
        ("framework", [stack.title] if stack else []),
        ("torch", sorted(torch - {""})),
        ("precision", sorted({cell.precision for cell in cells} - {""})),
        ("storage", [text.recorded(storage)] if storage else []),
    ):
        yield name, ", ".join(found) or "not recorded"


def _launcher(about: Mapping[str, JsonValue]) -> str:
    """How launches were started, in words; named by environment where there are several."""
    by_environment = about.get("launchers")
    if isinstance(by_environment, Mapping) and by_environment:
        if len(by_environment) == 1:
            return "".join(map(text.recorded, by_environment.values()))
        return "; ".join(f"{name}: {words}" for name, words in sorted(by_environment.items()))
    launcher = about.get("launcher")
    return text.recorded(launcher.get("used") if isinstance(launcher, Mapping) else launcher)


def _guard(about: Mapping[str, JsonValue], cells: Sequence[CellView]) -> str:
    """What stood between the jobs and the source checkpoints: each level that was used."""
    guard = about.get("guard")
    if isinstance(guard, Mapping):
        return text.recorded(guard.get("level"))
    used = {launch.guard for cell in cells for launch in cell.launches}
    used |= {cell.damage.guard for cell in cells if cell.damage}
    return "; ".join(sorted(used - {""}))


def _sources(stored: JsonValue) -> tuple[SourceView, ...]:
    found = stored.get("sources") if isinstance(stored, Mapping) else None
    views: list[SourceView] = []
    for each in found if isinstance(found, list) else ():
        with contextlib.suppress(*_OTHER_SHAPE):
            views.append(_source(each))
    return tuple(views)


def _source(stored: JsonValue) -> SourceView:
    changes = tuple(_source_change(change) for change in stored["changes"])
    compared = stored["after"] is not None
    return SourceView(
        path=str(stored["path"]),
        of=str(stored["of"]),
        files=len(stored["before"]),
        size_bytes=sum(int(record[0]) for record in stored["before"].values()),
        unchanged=not changes if compared or changes else None,
        changes=changes,
    )


def _source_change(change: JsonValue) -> str:
    running = ", ".join(map(str, change["running"]))
    return f"{change['file']}: {change['how']}" + (f", while {running} ran" if running else "")


def _texts(value: JsonValue) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _sections(about: Mapping[str, JsonValue]) -> tuple[Section, ...]:
    titles = {
        "versions": "Versions",
        "launcher": "Launcher",
        "guard": "Source guard",
        "node": "Node",
    }
    return tuple(
        Section(title, tuple(text.flatten(about[key])))
        for key, title in titles.items()
        if isinstance(about.get(key), Mapping) and about[key]
    )


def _environments(
    found: JsonValue, installed: JsonValue
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Columns and rows of the table of environments, the usual columns first."""
    if not isinstance(found, Mapping):
        return (), ()
    also = installed if isinstance(installed, Mapping) else {}
    flat = {
        name: {**dict(text.flatten(also.get(name) or {})), **dict(text.flatten(versions))}
        for name, versions in sorted(found.items())
    }
    present = {column for row in flat.values() for column in row if column}
    usual = [column for column in _ENVIRONMENT_COLUMNS if column in present]
    columns = (*usual, *sorted(present.difference(usual)))
    rows = tuple(
        (str(name), *(row.get(column, "–") for column in columns)) for name, row in flat.items()
    )
    return columns, rows
