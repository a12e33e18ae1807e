"""Make every state that an interrupted save can leave, and plan who restores it.

The effects around `replay`: read the events of a recorded save, put the bytes of each distinct
state together from what the recording left and what it destroyed, look offline which generation
each of its tensors is of, and write all that down. From that record alone, `launches` plans one
restore for each distinct checkpoint and a few real interruptions to confirm the replay: the same
record gives the same launches, so that a resumed run and a later judgement find them again.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import xxhash

from ckptdrill import formats
from ckptdrill.errors import UserError
from ckptdrill.fact_files import read_launch
from ckptdrill.model import (
    Checkpoint,
    Fault,
    FaultKind,
    JsonValue,
    Launch,
    Plan,
    Replay,
    Role,
)
from ckptdrill.replay import (
    Event,
    Held,
    Moment,
    Point,
    Scope,
    Tree,
    at_the_beginning,
    events_of,
    followed,
    left_by,
    points,
)
from ckptdrill.step import Setting, out_of, overlaid, saved_at
from ckptdrill.store import write_json

_BLOCK_BYTES = 1 << 20
_NUMBER = re.compile(r"\d+")
_NAME_DIGITS = 10
_LEFT = "left."  # begins the name of a state that a real interruption left


class Label(StrEnum):
    """What a checkpoint holds as its files say, the worst first."""

    MIXED = "mixed"  # tensors of both generations
    UNREADABLE = "unreadable"
    NOTHING = "nothing"
    OLD = "old"
    NEW = "new"


@dataclass(frozen=True)
class _Recorded:
    """One recorded save: where its files are, and how they came about."""

    out: Path
    kept: Path
    placed: Path | None
    ranks: tuple[tuple[Event, ...], ...]
    start: Tree
    final: Tree
    contents: Mapping[str, str]

    def file(self, version: str) -> Path:
        """The file that holds the whole of a version."""
        where, _, name = self.contents.get(version, "out/").partition("/")
        return (self.kept if where == "kept" else self.out) / name


# --------------------------------------------------------------------------------------------------
# The step


def replay(setting: Setting, step: Replay) -> None:
    """Make the states of `step` in its work folder and write its record.

    Raises UserError when the recording shows no save that could be interrupted.
    """
    began = time.perf_counter()
    first, again = _recorded(setting, step.recorded), _recorded(setting, step.again)
    if not any(event.n is not None for events in first.ranks for event in events):
        raise UserError(
            f"no file event was seen below {first.out} when step {step.recorded.stop_step} "
            "was saved",
            hint="does the job save at job.restore_step, below {out}?",
        )
    begun = at_the_beginning(first.start, first.ranks)
    states = _States(setting.run.work(step.id), first)
    left = [(point, left_by(first.start, first.ranks, point)) for point in points(first.ranks)]
    found = [(point, states.name_of(tree)) for point, tree in left]
    record: dict[str, Any] = {
        "id": step.id,
        "step": step.recorded.stop_step,
        "unexplained": _unexplained(first),
        "unrepeated": _unrepeated(first, again),
        "varying": _varying(first, again, [tree for _, tree in left]),
        "points": [_described(point, name) for point, name in found],
        "states": _labelled(setting, step, states, begun),
    }
    if FaultKind.KILL not in step.kinds:
        record |= _left_by_real_ones(step, record)
    took_s = round(time.perf_counter() - began, 3)
    write_json(setting.run.replay(step.id), {**record, "took_s": took_s})


def _left_by_real_ones(step: Replay, record: Mapping[str, Any]) -> dict[str, Any]:
    """Points and states for interruptions that a process may answer in its own way: what they leave
    cannot be worked out, so each of the points is a launch, and its folder is a state.
    """
    chosen = confirmed(step, record)
    if FaultKind.LEAVE in step.kinds:
        chosen = [{**chosen[0], "id": "leave", "rank": None, "event": None, "op": "trains-on"}]
    kind = step.kinds[0].value
    found = [{**point, "cut": {}, "state": f"{_LEFT}{kind}.{point['id']}"} for point in chosen]
    known = next(iter(record["states"].values()))["candidates"]
    candidates = [{**each, "digest": None, "label": None, "old": 0, "new": 0} for each in known]
    states = {point["state"]: {"files": None, "candidates": candidates} for point in found}
    return {"points": found, "states": states, "real": True}


def take(setting: Setting, launch: Launch, out: Path) -> None:
    """Keep the folder that a real interruption has left, if it is to be restored, as a state."""
    state = (launch.fault.parameters if launch.fault else {}).get("state")
    if state is not None and launch.waits_for is not None:
        target = setting.run.work(launch.waits_for) / "states" / str(state)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(out, target, symlinks=True)


def _recorded(setting: Setting, launch: Launch) -> _Recorded:
    work, out = setting.run.work(launch.id), out_of(setting.run, launch.id)
    ranks = events_of(read_launch(setting.run, launch.id, launch.topology.world_size))
    placed = overlaid(setting, launch)
    start = Tree()
    if placed is not None:
        source, target = placed
        start = _tree_of(source, target.relative_to(out))
    final, contents = followed(start, ranks)
    return _Recorded(out, work / "kept", placed and placed[0], ranks, start, final, contents)


def _tree_of(source: Path, below: Path) -> Tree:
    """The tree of a folder or file that lies at `below`."""
    tree = Tree()
    tree.folders |= {parent.as_posix() for parent in below.parents}
    for folder, _, names in os.walk(source):
        here = below / Path(folder).relative_to(source)
        tree.folders.add(here.as_posix())
        for name in names:
            path = (here / name).as_posix()
            tree.files[path] = Held(f"start:{path}", (Path(folder) / name).stat().st_size)
    if source.is_file():
        path = below.as_posix()
        tree.files[path] = Held(f"start:{path}", source.stat().st_size)
    return tree


def _unexplained(recorded: _Recorded) -> str | None:
    """How the recorded folder differs from what its events lead to, if it does."""
    there = dict(_sizes(recorded.out))
    known = {path: held.size_bytes for path, held in recorded.final.files.items()}
    for path in sorted({*there, *known}):
        if there.get(path) != known.get(path):
            return (
                f"{path} has {_bytes(there.get(path))} on disk and {_bytes(known.get(path))} "
                "by its events"
            )
    return None


def _bytes(size: int | None) -> str:
    return "no file" if size is None else f"{size} bytes"


def _unrepeated(first: _Recorded, again: _Recorded) -> str | None:
    """Where the second recording made another event, if it did."""
    for rank, (events, repeated) in enumerate(zip(first.ranks, again.ranks, strict=True)):
        one, two = ([*map(_anonymous, _numbered(each))] for each in (events, repeated))
        for n, (a, b) in enumerate(zip(one, two, strict=False)):
            if a != b:
                return f"event {n} of rank {rank} is {a[0]} {a[1]}, then {b[0]} {b[1]}"
        if len(one) != len(two):
            return f"rank {rank} makes {len(one)} events, then {len(two)}"
    return None


def _numbered(events: Iterable[Event]) -> Iterator[Event]:
    return (event for event in events if event.n is not None)


def _anonymous(event: Event) -> tuple[str, str]:
    """Operation and path, with numbers in names (times, process ids) left out."""
    return event.op, _NUMBER.sub("#", event.path or "")


def _varying(first: _Recorded, again: _Recorded, trees: Iterable[Tree]) -> list[str]:
    """The files that two undisturbed saves do not write alike, under every name that they have on
    the way.
    """
    one, two = listing(first.out), listing(again.out)
    varying = {path for path in one if one[path] != two.get(path)}
    versions = {held.version for path, held in first.final.files.items() if path in varying}
    for tree in trees:
        varying |= {path for path, held in tree.files.items() if held.version in versions}
    return sorted(varying)


def _sizes(out: Path) -> Iterator[tuple[str, int]]:
    for folder, _, names in os.walk(out):
        for name in names:
            path = Path(folder) / name
            if not path.is_symlink():
                yield path.relative_to(out).as_posix(), path.stat().st_size


def listing(out: Path) -> dict[str, list[JsonValue]]:
    """[size in bytes, xxh3_128 hex] of every file below `out`, by relative path; a link's text."""
    found: dict[str, list[JsonValue]] = {}
    for folder, folders, names in os.walk(out):
        for name in (*names, *(n for n in folders if (Path(folder) / n).is_symlink())):
            path = Path(folder) / name
            relative = path.relative_to(out).as_posix()
            if path.is_symlink():
                found[relative] = [0, str(path.readlink())]
            else:
                size = path.stat().st_size
                found[relative] = [size, _digest(path, size)]
    return dict(sorted(found.items()))


def _digest(path: Path, size_bytes: int) -> str:
    """xxh3_128 of the first `size_bytes` of a file."""
    digest, left = xxhash.xxh3_128(), size_bytes
    with path.open("rb") as stream:
        while left > 0 and (block := stream.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _described(point: Point, state: str) -> dict[str, JsonValue]:
    event = point.event
    return {
        "id": point.id,
        "scope": point.scope.value,
        "rank": point.rank,
        "event": event.n,
        "op": event.op,
        "path": event.path,
        "target": event.target,
        "moment": point.moment.value,
        "cut": dict(point.cut),
        "state": state,
    }


# --------------------------------------------------------------------------------------------------
# States on disk


class _States:
    """The distinct states below `folder`, each content once under `contents/`, linked from there.

    Nothing but copies of them ever reaches a job.
    """

    def __init__(self, folder: Path, recorded: _Recorded) -> None:
        self.folder = folder
        self.listings: dict[str, dict[str, list[JsonValue]]] = {}
        self.recorded = recorded
        self._names: dict[Any, str] = {}
        self._digests: dict[Held, str] = {}
        (folder / "contents").mkdir(parents=True, exist_ok=True)

    def name_of(self, tree: Tree) -> str:
        """The name of the state of this tree, which is on disk then."""
        name = self._names.get(tree.key)
        if name is None:
            name = self._names[tree.key] = self._made(tree)
        return name

    def path(self, name: str) -> Path:
        """The folder of a state."""
        return self.folder / "states" / name

    def _made(self, tree: Tree) -> str:
        files = {path: [held.size_bytes, self._content(held)] for path, held in tree.files.items()}
        files |= {path: [0, text] for path, text in tree.links.items()}
        told = repr((sorted(files.items()), sorted(tree.folders)))
        name = xxhash.xxh3_128_hexdigest(told.encode())[:_NAME_DIGITS]
        if name not in self.listings:
            self.listings[name] = dict(sorted(files.items()))
            self._write(tree, self.path(name))
        return name

    def _content(self, held: Held) -> str:
        """The digest of some bytes, which lie under that name then."""
        if held not in self._digests:
            source = self.recorded.file(held.version)
            if held.version.startswith("start:") and not source.is_file():
                source = self.recorded.out / held.version.removeprefix("start:")
            digest = self._digests[held] = _digest(source, held.size_bytes)
            target = self.folder / "contents" / digest
            if not target.exists():
                shutil.copyfile(source, target)
                os.truncate(target, held.size_bytes)
        return self._digests[held]

    def _write(self, tree: Tree, root: Path) -> None:
        for folder in sorted(tree.folders):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for path, held in tree.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(self.folder / "contents" / self._digests[held], root / path)
        for path, text in tree.links.items():
            (root / path).symlink_to(text)


# --------------------------------------------------------------------------------------------------
# Generations, as the files say


def _labelled(
    setting: Setting, step: Replay, states: _States, begun: Tree
) -> dict[str, dict[str, JsonValue]]:
    """For each state its files, and the checkpoints in it that could be restored, newest first."""
    old, new = states.name_of(begun), states.name_of(states.recorded.final)
    generations = [
        (number, path)
        for number in sorted(setting.matrix.job.saves, reverse=True)
        if number <= step.recorded.stop_step
        for path in [_relative(setting, step.recorded, number)]
    ]
    paths = {path: number for number, path in reversed(generations)}  # one path: the newest step
    wholes = {path: _Wholes.at(states.path(old) / path, states.path(new) / path) for path in paths}
    told: dict[tuple[str, str | None], Mapping[str, JsonValue]] = {}
    described: dict[str, dict[str, JsonValue]] = {}
    for name, files in states.listings.items():
        candidates = []
        for path, number in sorted(paths.items(), key=lambda item: -item[1]):
            digest = _subtree(files, path)
            if (path, digest) not in told:
                older = number < step.recorded.stop_step
                told[path, digest] = _told(states.path(name) / path, wholes[path], older=older)
            candidates.append(
                {"step": number, "path": path, "digest": digest, **told[path, digest]}
            )
        described[name] = {"files": files, "candidates": candidates}
    return described


@dataclass(frozen=True)
class _Wholes:
    """The digests of every chunk before the save and after it."""

    old: Mapping[str, str]
    new: Mapping[str, str]

    @classmethod
    def at(cls, old: Path, new: Path) -> _Wholes:
        """Those of the checkpoints at two paths; empty where there is none that can be read."""
        return cls(*(_chunks_or_none(path) for path in (old, new)))


def _relative(setting: Setting, launch: Launch, number: int) -> str:
    out = out_of(setting.run, launch.id)
    return saved_at(setting, launch.topology, out, number).relative_to(out).as_posix()


def _subtree(files: Mapping[str, list[JsonValue]], path: str) -> str | None:
    """A digest of what lies at `path` in a state; None when nothing does."""
    below = sorted(
        (name[len(path) :], value)
        for name, value in files.items()
        if name == path or name.startswith(f"{path}/")
    )
    return xxhash.xxh3_128_hexdigest(repr(below).encode())[:_NAME_DIGITS] if below else None


def _told(path: Path, wholes: _Wholes, *, older: bool) -> dict[str, JsonValue]:
    """The label of the checkpoint at `path`, and of how many chunks it is known which they are.

    An `older` step is at a path of its own, where the interrupted save has no business.
    """
    if not (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        return {"label": Label.NOTHING.value, "old": 0, "new": 0}
    try:
        here = _chunks(path)
    except (UserError, OSError, ValueError):
        return {"label": Label.UNREADABLE.value, "old": 0, "new": 0}
    before, after = wholes.old, wholes.new
    telling = {key for key in here if before.get(key) != after.get(key)}
    counts = {
        "old": sum(here[key] == before.get(key) for key in telling),
        "new": sum(here[key] == after.get(key) for key in telling),
    }
    unknown = len(telling) - counts["old"] - counts["new"]
    if unknown or (counts["old"] and counts["new"]):
        label = Label.MIXED
    else:
        label = Label.OLD if older or counts["old"] else Label.NEW
    return {"label": label.value, **counts}


def _chunks(path: Path) -> dict[str, str]:
    """A digest of the stored bytes of each chunk of each tensor."""
    found = {}
    for key, tensor in formats.tensors(path).items():
        for chunk in tensor.chunks:
            file, start, size = formats.payload(path, chunk)
            with file.open("rb") as stream:
                stream.seek(start)
                data = stream.read(size)
            if len(data) != size:
                raise UserError(f"{key!r} is cut off", where=str(file))
            found[f"{key}@{chunk.offsets}"] = xxhash.xxh3_128_hexdigest(data)
    return found


def _chunks_or_none(path: Path) -> dict[str, str]:
    try:
        return _chunks(path) if path.exists() else {}
    except (UserError, OSError, ValueError):
        return {}


# --------------------------------------------------------------------------------------------------
# What the record plans


def launches(plan: Plan, record: Mapping[str, Any], *, in_place: bool) -> tuple[Launch, ...]:
    """The launches that a record asks for: restores of what the states hold, and confirmations."""
    if plan.replay is None:
        return ()
    found = {launch.id: launch for launch in _restores(plan, plan.replay, record, in_place)}
    for point in confirmed(plan.replay, record):
        launch = _confirmation(plan.replay, record, point)
        found[launch.id] = launch
    return tuple(found.values())


def restores_of(
    plan: Plan, record: Mapping[str, Any], state: str, *, in_place: bool
) -> tuple[tuple[int, str], ...]:
    """(step, launch id) of what is tried in a state, in that order: the newest checkpoint first."""
    cell = plan.cell.id
    if in_place:
        return ((int(record["step"]), f"restore.{cell}.{state}"),)
    if state.startswith(_LEFT):
        steps = [int(each["step"]) for each in record["states"][state]["candidates"]]
        return tuple((step, f"restore.{cell}.{state}.{step}") for step in steps)
    return tuple(
        (int(each["step"]), f"restore.{cell}.{each['step']}-{each['digest']}")
        for each in record["states"][state]["candidates"]
        if each["digest"] is not None
    )


def scripts(plan: Plan, record: Mapping[str, Any], *, in_place: bool) -> dict[str, str]:
    """The replay script of each distinct checkpoint, `repro-POINT.sh` after the first point that
    leaves it, and the launch that it repeats.
    """
    named: dict[str, str] = {}
    for point in record["points"]:
        for number, launch_id in restores_of(plan, record, point["state"], in_place=in_place):
            if number == record["step"]:
                named.setdefault(launch_id, f"repro-{point['id']}.sh")
    return {name: launch_id for launch_id, name in named.items()}


def _restores(
    plan: Plan, step: Replay, record: Mapping[str, Any], in_place: bool
) -> Iterator[Launch]:
    window = plan.restore.stop_step - int(record["step"])
    known = set[str]()
    leaving = {point["state"]: confirmation_id(step, point) for point in record["points"]}
    for state in sorted(record["states"]):
        for number, launch_id in restores_of(plan, record, state, in_place=in_place):
            if launch_id not in known:
                known.add(launch_id)
                checkpoint = Checkpoint(step.recorded.id, number, step.id, state=state)
                yield replace(
                    plan.restore,
                    id=launch_id,
                    stop_step=number + window,
                    restores=checkpoint,
                    waits_for=leaving[state] if state.startswith(_LEFT) else step.id,
                )


def _confirmation(step: Replay, record: Mapping[str, Any], point: Mapping[str, Any]) -> Launch:
    if record.get("real"):
        kind, parameters = step.kinds[0], {"state": point["state"]}
    else:
        kind = FaultKind.KILL if point["moment"] == Moment.BEFORE.value else FaultKind.TORN
        parameters = {"sizes": point["cut"]}
    fault = Fault(kind, rank=point["rank"], event=point["event"], parameters=parameters)
    return replace(
        step.recorded,
        id=confirmation_id(step, point),
        role=Role.INTERRUPTED,
        fault=fault,
        waits_for=step.id,
    )


def confirmation_id(step: Replay, point: Mapping[str, Any]) -> str:
    """The launch in which a point is interrupted for real."""
    return f"confirm.{step.id.removeprefix('replay.')}.{point['id']}"


def confirmed(step: Replay, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The points that are interrupted for real: the worst states first, then other ranks and
    moments.
    """
    if record.get("real"):
        return list(record["points"])
    labels = list(Label)

    def label_of(point: Mapping[str, Any]) -> Label:
        return Label(record["states"][point["state"]]["candidates"][0]["label"])

    moments = list(Moment) if FaultKind.KILL in step.kinds else [Moment.BEFORE]
    single = [
        point
        for point in record["points"]
        if point["scope"] == Scope.RANK.value and point["moment"] in moments
    ]
    waiting = sorted(single, key=lambda p: (labels.index(label_of(p)), p["event"], -p["rank"]))
    chosen: list[Mapping[str, Any]] = []
    while waiting and len(chosen) < step.confirm:
        seen = [{_trait(each, number, label_of) for each in chosen} for number in range(3)]
        best = max(
            waiting,
            key=lambda p: sum(_trait(p, i, label_of) not in seen[i] for i in range(3)),
        )
        chosen.append(best)
        waiting.remove(best)
    return chosen


def _trait(point: Mapping[str, Any], number: int, label_of: Any) -> Any:
    return (label_of(point), point["rank"], point["moment"])[number]
