"""What an interruption leaves behind, worked out from the recorded events of one undisturbed save.

Pure: no file is opened, no process is started. First the facts of every rank become `Event`s. Then
the folder is followed through them as a `Tree` of names, each holding some bytes of some version of
a file; following all of them must lead to the folder that is really there. Then every rank is
stopped before each of its events: the others go on as far as the collectives allow without it, or
stop at the same moment, as they do when the whole job is killed. Between two events a file grows,
so there are two more points for each growth: nothing of it on disk, and half of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from ckptdrill.model import LaunchRecord


@dataclass(frozen=True)
class Event:
    """One file event or collective of one rank. `n` numbers the file events of the save.

    `sizes` are the bytes on disk of the files this rank was writing, just before the event. `data`
    holds what only some kinds have.
    """

    rank: int
    index: int
    n: int | None
    op: str
    path: str | None
    target: str | None
    sizes: Mapping[str, int]
    at_ns: int
    thread: str
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Names the content that a file gets by being opened or cut here."""
        return f"{self.rank}:{self.index}"

    @property
    def meeting(self) -> tuple[str, int]:
        """The process group, and the number of this collective in it."""
        return str(self.data["group"]), int(self.data["number"])


@dataclass(frozen=True)
class Held:
    """The first `size_bytes` of one version of a file."""

    version: str
    size_bytes: int


@dataclass
class Tree:
    """A folder by relative names: files, folders, and links with their texts."""

    files: dict[str, Held] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"."})
    links: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Tree:
        """An independent tree of the same names."""
        return Tree(dict(self.files), set(self.folders), dict(self.links))

    @property
    def key(self) -> tuple[frozenset[Any], frozenset[str], frozenset[Any]]:
        """Equal for equal trees."""
        return (
            frozenset(self.files.items()),
            frozenset(self.folders),
            frozenset(self.links.items()),
        )


class Moment(StrEnum):
    """Where between two events a point lies."""

    BEFORE = "before"  # everything up to the event has happened
    TORN = "torn"  # of what was written since the last event, half is on disk
    UNWRITTEN = "unwritten"  # of what was written since the last event, nothing is on disk


class Scope(StrEnum):
    """Who is interrupted."""

    RANK = "rank"  # one rank; the others go on as far as they can without it
    JOB = "job"  # every rank at the same moment


@dataclass(frozen=True)
class Point:
    """One place at which a save can be interrupted; `cut` are the sizes that torn files end at."""

    scope: Scope
    rank: int
    event: Event
    moment: Moment
    cut: Mapping[str, int]

    @property
    def id(self) -> str:
        """`rank1.event3.torn`, `job.rank0.event7.before`."""
        who = f"rank{self.rank}" if self.scope is Scope.RANK else f"job.rank{self.rank}"
        return f"{who}.event{self.event.n}.{self.moment.value}"


# --------------------------------------------------------------------------------------------------
# Facts to events


def events_of(record: LaunchRecord) -> tuple[tuple[Event, ...], ...]:
    """The events of each rank in the order in which it recorded them."""
    by_rank: dict[int, list[Event]] = {rank: [] for rank in range(record.world_size)}
    for fact in record.facts:
        if fact.kind in {"file_event", "sync"}:
            data = fact.data
            of_rank = by_rank[fact.rank]
            of_rank.append(
                Event(
                    rank=fact.rank,
                    index=len(of_rank),
                    n=data.get("n"),
                    op=data["op"] if fact.kind == "file_event" else "collective",
                    path=data.get("path"),
                    target=data.get("target"),
                    sizes=data.get("sizes", {}),
                    at_ns=int(data["at_ns"]),
                    thread=str(data.get("thread", "")),
                    data=data,
                )
            )
    return tuple(tuple(events) for events in by_rank.values())


# --------------------------------------------------------------------------------------------------
# Following events through a tree


def follow(tree: Tree, event: Event) -> None:
    """Let `event` happen in `tree`; one that the file system would refuse changes nothing."""
    grow(tree, event.sizes)
    act = _OPS.get(event.op)
    if act is not None:
        act(tree, event)


def grow(tree: Tree, sizes: Mapping[str, int]) -> None:
    """Files have come to these sizes."""
    for path, size in sizes.items():
        if path in tree.files:
            tree.files[path] = Held(tree.files[path].version, size)


def _mkdir(tree: Tree, event: Event) -> None:
    if event.path is not None and _parent(event.path) in tree.folders:
        tree.folders.add(event.path)


def _rmdir(tree: Tree, event: Event) -> None:
    if event.path is not None and not _inside(tree, event.path):
        tree.folders.discard(event.path)


def _open(tree: Tree, event: Event) -> None:
    path, data = event.path, event.data
    there = tree.files.get(path or "")
    if path is None or _parent(path) not in tree.folders or (there and data.get("exclusive")):
        return
    if there is not None and not data.get("truncates"):
        tree.files[path] = Held(event.version, there.size_bytes)
    elif there is not None or data.get("creates", True):
        tree.files[path] = Held(event.version, 0)


def _truncate(tree: Tree, event: Event) -> None:
    if event.path in tree.files:
        tree.files[event.path or ""] = Held(event.version, int(event.data["length"]))


def _rename(tree: Tree, event: Event) -> None:
    source, target = event.path, event.target
    if source is None:
        return  # it came from outside: the comparison with the real folder will tell
    for names in (tree.files, tree.links):
        if source in names:
            held = names.pop(source)
            if target is not None:
                tree.files.pop(target, None)
                tree.links.pop(target, None)
                names[target] = held  # type: ignore[assignment]
            return
    if source in tree.folders:
        _move_folder(tree, source, target)


def _move_folder(tree: Tree, source: str, target: str | None) -> None:
    if target is not None and _inside(tree, target):
        return  # not empty: refused

    def moved(path: str) -> str | None:
        if path != source and not path.startswith(f"{source}/"):
            return path
        return None if target is None else target + path[len(source) :]

    tree.files = {new: held for path, held in tree.files.items() if (new := moved(path))}
    tree.links = {new: text for path, text in tree.links.items() if (new := moved(path))}
    tree.folders = {new for path in tree.folders if (new := moved(path))}


def _remove(tree: Tree, event: Event) -> None:
    tree.files.pop(event.path or "", None)
    tree.links.pop(event.path or "", None)


def _link(tree: Tree, event: Event) -> None:
    if event.path in tree.files and event.target is not None:
        tree.files.setdefault(event.target, tree.files[event.path or ""])


def _symlink(tree: Tree, event: Event) -> None:
    if event.path is not None and event.path not in {*tree.files, *tree.links, *tree.folders}:
        tree.links[event.path] = str(event.data["text"])


_OPS = {
    "mkdir": _mkdir,
    "rmdir": _rmdir,
    "open": _open,
    "truncate": _truncate,
    "rename": _rename,
    "remove": _remove,
    "link": _link,
    "symlink": _symlink,
}


def _parent(path: str) -> str:
    return PurePosixPath(path).parent.as_posix()


def _inside(tree: Tree, folder: str) -> list[str]:
    names = (*tree.files, *tree.links, *tree.folders)
    return [name for name in names if name.startswith(f"{folder}/")]


def in_time(events: Iterable[Event]) -> list[Event]:
    """The events of all ranks in the order in which they happened."""
    return sorted(events, key=lambda event: (event.at_ns, event.rank, event.index))


def followed(start: Tree, ranks: Sequence[Sequence[Event]]) -> tuple[Tree, Mapping[str, str]]:
    """The tree after all events, and where the whole content of each version is: `kept/NAME` for
    what was destroyed since, `out/PATH` for what is still there.
    """
    tree, contents = start.copy(), dict[str, str]()
    for event in in_time(event for events in ranks for event in events):
        grow(tree, event.sizes)
        kept = event.data.get("kept")
        victim = event.target if event.op == "rename" and event.target else event.path
        if kept is not None and victim in tree.files:
            contents.setdefault(tree.files[victim].version, f"kept/{kept}")
        follow(tree, event)
    for path, held in tree.files.items():
        contents.setdefault(held.version, f"out/{path}")
    return tree, contents


def at_the_beginning(start: Tree, ranks: Sequence[Sequence[Event]]) -> Tree:
    """The tree just before the first numbered event: what the save found."""
    tree = start.copy()
    first_ns = min((e.at_ns for events in ranks for e in events if e.n is not None), default=0)
    for event in in_time(event for events in ranks for event in events):
        if event.n is None and event.at_ns < first_ns:
            follow(tree, event)
    return tree


# --------------------------------------------------------------------------------------------------
# Points, and what each leaves


def points(ranks: Sequence[Sequence[Event]]) -> Iterator[Point]:
    """Every point of every rank, for one rank and for the whole job."""
    for rank, events in enumerate(ranks):
        sizes: dict[str, int] = {}
        for event in events:
            if event.n is not None:
                for scope in Scope:
                    yield from _points_at(scope, rank, event, sizes)
            sizes |= event.sizes
            if event.op == "open" and event.data.get("truncates"):
                sizes[event.path or ""] = 0


def _points_at(scope: Scope, rank: int, event: Event, sizes: Mapping[str, int]) -> Iterator[Point]:
    if event.sizes:
        before = {path: sizes.get(path, 0) for path in event.sizes}
        half = {path: before[path] + (end - before[path]) // 2 for path, end in event.sizes.items()}
        yield Point(scope, rank, event, Moment.UNWRITTEN, before)
        yield Point(scope, rank, event, Moment.TORN, half)
    yield Point(scope, rank, event, Moment.BEFORE, {})


def left_by(start: Tree, ranks: Sequence[Sequence[Event]], point: Point) -> Tree:
    """The folder that an interruption at `point` leaves."""
    if point.scope is Scope.JOB:
        done = [e for events in ranks for e in events if e.at_ns < point.event.at_ns]
    else:
        done = list(_without(ranks, point.event))
    tree = start.copy()
    for event in in_time(done):
        follow(tree, event)
    grow(tree, {**point.event.sizes, **point.cut})
    return tree


def _without(ranks: Sequence[Sequence[Event]], last: Event) -> Iterator[Event]:
    """What happens when the rank of `last` is gone before it: its own events until then, and those
    of the others up to the collectives in which they wait for it.
    """
    dead = last.rank
    entered = [{e.meeting for e in events if e.op == "collective"} for events in ranks]
    entered[dead] = {
        e.meeting for e in ranks[dead] if e.op == "collective" and e.index < last.index
    }
    reached: list[list[Event]] = [list(events) for events in ranks]
    reached[dead] = [event for event in ranks[dead] if event.index < last.index]
    changed = True
    while changed:
        changed = False
        for rank, events in enumerate(ranks):
            if rank == dead:
                continue
            reached[rank] = list(_reached(events, entered))
            now = {e.meeting for e in reached[rank] if e.op == "collective"}
            changed = changed or now != entered[rank]
            entered[rank] = now
    for events in reached:
        yield from events


def _reached(events: Sequence[Event], entered: Sequence[set[tuple[str, int]]]) -> Iterator[Event]:
    """The events of one rank up to the first collective, in each thread, that never ends."""
    stuck: set[str] = set()
    for event in events:
        if event.thread in stuck:
            continue
        yield event
        if event.op == "collective" and not _ends(event, entered):
            stuck.add(event.thread)


def _ends(event: Event, entered: Sequence[set[tuple[str, int]]]) -> bool:
    """Whether this rank comes out of a collective, given which ones every rank enters."""
    members, root = list(event.data["members"]), event.data.get("root")
    waits = event.data["waits"]
    if waits == "all" or (waits == "to-root" and root == event.rank):
        awaited = members
    else:
        awaited = [] if root == event.rank else [root]
    return all(event.meeting in entered[rank] for rank in awaited)
