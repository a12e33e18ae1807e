"""Proof, per run, that no source changed: what every file was, what it is, and who ran meanwhile.

A source is a checkpoint that is restored: the one that the run starts from, and each that a launch
saved for others. In order: what it was is written down before anybody can restore it (the first in
`sources.json`, the others in `checkpoints.json` of the launch that saved them); whenever a launch
has ended, size, time and inode are looked at, so that a change is known together with the launches
that ran then; at the end of the run everything is read once more. What was seen in between counts
also when it has been undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckptdrill import isolate
from ckptdrill.errors import UserError
from ckptdrill.isolate import Snapshot
from ckptdrill.model import Launch
from ckptdrill.step import Setting, checkpoint_path, restored_checkpoints
from ckptdrill.store import RunFolder, read_json, read_lines, write_json

# In place of the launch that saved it: the checkpoint that the run was given.
GIVEN = "start_from"
_UNDONE = ", and put back"
_COLUMNS = ("size_bytes", "mtime_ns", "inode", "xxh3_128")


@dataclass(frozen=True)
class Change:
    """One file that is not what it was; `running` are the launches that ran then."""

    file: str
    how: str
    running: tuple[str, ...]

    def __str__(self) -> str:
        """In one line, for the terminal and run.json."""
        ran = f", while {', '.join(self.running)} ran" if self.running else ""
        return f"{self.file}: {self.how}{ran}"


@dataclass
class Source:
    """A checkpoint that is restored, and the launch that saved it (or GIVEN).

    `after` is None until it has been read at the end of a run; `changes` are by file.
    """

    path: str
    of: str
    before: Snapshot
    after: Snapshot | None = None
    changes: dict[str, Change] = field(default_factory=dict)

    def look(self, running: Collection[str]) -> bool:
        """Note what differs at a glance and was not noted before; whether anything is."""
        found = isolate.changes(self.before, self._now(isolate.glance))
        new = {file: how for file, how in found.items() if file not in self.changes}
        self.changes |= {
            file: Change(file, how, tuple(sorted(running))) for file, how in new.items()
        }
        return bool(new)

    def compare(self, running: Collection[str]) -> None:
        """Read everything again; `running` are the launches that may have changed it unseen."""
        self.after = self._now(isolate.snapshot)
        found = isolate.changes(self.before, self.after)
        for file, change in self.changes.items():
            found.setdefault(file, change.how.removesuffix(_UNDONE) + _UNDONE)
        for file, how in found.items():
            known = self.changes.get(file)
            ran = known.running if known else tuple(sorted(running))
            self.changes[file] = Change(file, how, ran)

    def _now(self, take: Callable[[Path], dict[str, list[int | str]]]) -> Snapshot:
        """What is there; nothing, where it has been moved, removed, or closed to us."""
        try:
            return take(Path(self.path)) if Path(self.path).exists() else {}
        except (OSError, UserError):
            return {}


@dataclass
class Watch:
    """The sources of a run in progress, by path. Its steps may become more while it goes on."""

    run: RunFolder
    sources: dict[str, Source] = field(default_factory=dict)

    def saved(self, setting: Setting, launch_id: str) -> None:
        """Write down the checkpoints of a launch that others restore, as they are at its end."""
        used = (each for each in restored_checkpoints(setting) if each.launch_id == launch_id)
        paths = {checkpoint_path(setting, each) for each in used}
        saved = {str(path): isolate.snapshot(path) for path in paths if path.exists()}
        if saved:
            write_json(_saved_file(self.run, launch_id), saved)
            self.sources |= {p: Source(p, launch_id, files) for p, files in saved.items()}

    def look(self, running: Collection[str]) -> None:
        """See what has changed since the last look, while `running` ran. Reads no content."""
        new = [source.look(running) for source in self.sources.values()]
        if any(new):
            self.write()

    def close(self, setting: Setting) -> tuple[str, ...]:
        """Compare every source, write `sources.json`, and say what has changed.

        Checkpoints that were deleted after a Pass were compared before: that word stands.
        """
        for source in self.sources.values():
            if source.of == GIVEN or self.run.work(source.of).exists():
                source.compare(ran_since(setting, source.of))
        self.write(guards(setting))
        return tuple(
            f"{path}: {change}"
            for path, source in sorted(self.sources.items())
            for change in source.changes.values()
        )

    def write(self, guarded: Mapping[str, int] | None = None) -> None:
        """Put what is known into `sources.json`; `guarded`: see `guards`."""
        sources = [asdict(source) for _, source in sorted(self.sources.items())]
        for each in sources:
            each["changes"] = list(each["changes"].values())
        content = {"columns": _COLUMNS, "sources": sources, "guards": guarded or {}}
        write_json(self.run.sources, content)


def watch(setting: Setting) -> Watch:
    """Begin to watch a run, or go on with one that was stopped.

    Raises UserError when the checkpoint that the run starts from cannot be read, or holds what no
    job may be given.
    """
    found = {source.path: source for source in _written(setting.run)}
    start_from = setting.matrix.job.start_from
    if start_from is not None and start_from not in found:
        isolate.examine(Path(start_from))
        found[start_from] = Source(start_from, GIVEN, isolate.snapshot(Path(start_from)))
    for step in setting.steps.values():
        if isinstance(step, Launch) and _saved_file(setting.run, step.id).exists():
            for path, files in read_json(_saved_file(setting.run, step.id)).items():
                found.setdefault(path, Source(path, step.id, files))
    begun = Watch(setting.run, found)
    begun.write()
    return begun


def _written(run: RunFolder) -> Iterator[Source]:
    """What an earlier process of this run has seen, but for launches that are to run again."""
    sources = read_json(run.sources)["sources"] if run.sources.exists() else []
    for each in sources:
        if each["of"] == GIVEN or _saved_file(run, each["of"]).exists():
            yield Source(**{**each, "changes": {c["file"]: _change(c) for c in each["changes"]}})


def _change(written: Mapping[str, Any]) -> Change:
    return Change(written["file"], written["how"], tuple(written["running"]))


def ran_since(setting: Setting, of: str) -> tuple[str, ...]:
    """The launches that have run since the launch `of` saved a source, by the order of the
    journal; all of them for the source that was given.
    """
    ran: set[str] = set()
    for _, line in read_lines(setting.run.journal):
        step_id = str(line.get("step")) if isinstance(line, dict) else ""
        if step_id == of:
            ran.clear()
        elif isinstance(setting.steps.get(step_id), Launch):
            ran.add(step_id)
    return tuple(sorted(ran))


def guards(setting: Setting) -> dict[str, int]:
    """What stood between launches and sources, in words, and between how many launches."""
    found: Counter[str] = Counter()
    for step in setting.steps.values():
        folder = setting.run.launch(step.id) if isinstance(step, Launch) else None
        if folder is not None and (folder / "exit.json").exists():
            launch, ended = read_json(folder / "launch.json"), read_json(folder / "exit.json")
            refused, bound = ended.get("bind_refused"), bool(ended.get("bound_read_only"))
            words = isolate.guard_in_words(launch.get("guard"), refused, bound=bound)
            found[words or "none needed"] += 1
    return dict(found)


def _saved_file(run: RunFolder, launch_id: str) -> Path:
    return run.launch(launch_id) / "checkpoints.json"
