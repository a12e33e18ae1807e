"""What every interruption of a save leaves, from events written down by hand.

The save is that of two ranks which write a shard each over an old one, meet, and of which rank 0
then replaces the metadata: first it removes the old one, then it renames the new one into place.
"""

from collections.abc import Callable
from typing import Any

import pytest

from ckptdrill.model import Fact, LaunchRecord
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

OLD = Tree(
    {
        "ck/shard0": Held("start:ck/shard0", 100),
        "ck/shard1": Held("start:ck/shard1", 100),
        "ck/meta": Held("start:ck/meta", 10),
    },
    {".", "ck"},
)


class Writer:
    """Writes the facts of one rank; all ranks share the clock."""

    clock_ns = 0

    def __init__(self, rank: int) -> None:
        self.rank, self.numbered, self.met = rank, 0, 0
        self.facts: list[Fact] = []

    def event(self, op: str, path: str | None = None, **data: Any) -> None:
        self._fact("file_event", n=self.numbered, op=op, path=path, **data)
        self.numbered += 1

    def meets(self, waits: str = "all", root: int = 0) -> None:
        data = {"op": "gather", "waits": waits, "group": "world", "number": self.met, "root": root}
        self._fact("sync", members=[0, 1], **data)
        self.met += 1

    def _fact(self, kind: str, **data: Any) -> None:
        Writer.clock_ns += 1
        data |= {"at_ns": Writer.clock_ns}
        self.facts.append(Fact(kind, self.rank, 8, data, len(self.facts) + 1))


def saved(to_root: bool = False) -> tuple[tuple[Event, ...], ...]:
    """The events of both ranks."""
    zero, one = Writer(0), Writer(1)
    for writer in (zero, one):
        writer.event("mkdir", "ck")
    for writer in (zero, one):
        shard = f"ck/shard{writer.rank}"
        writer.event("open", shard, truncates=True, kept=f"old{writer.rank}")
        writer.event("fsync", shard, sizes={shard: 80})
    for writer in (zero, one):
        writer.meets("to-root" if to_root else "all")
    zero.event("open", "ck/meta.tmp", truncates=True)
    zero.event("remove", "ck/meta", sizes={"ck/meta.tmp": 12}, kept="old-meta")
    zero.event("rename", "ck/meta.tmp", target="ck/meta")
    for writer in (one, zero):
        writer.meets("from-root")
        writer.event("saved")
    return events_of(LaunchRecord.made_of("record", (*zero.facts, *one.facts), {}, 2))


def point_of(
    ranks: tuple[tuple[Event, ...], ...], rank: int, op: str, path: str | None, **wanted: Any
) -> Point:
    found = [
        point
        for point in points(ranks)
        if (point.rank, point.event.op, point.event.path) == (rank, op, path)
        and point.scope is wanted.get("scope", Scope.RANK)
        and point.moment is wanted.get("moment", Moment.BEFORE)
    ]
    assert len(found) == 1
    return found[0]


def versions(tree: Tree) -> dict[str, tuple[str, int]]:
    """File -> `old` or `new`, and its size."""
    return {
        path: ("old" if held.version.startswith("start:") else "new", held.size_bytes)
        for path, held in sorted(tree.files.items())
    }


def test_following_all_events_leads_to_the_saved_folder() -> None:
    tree, contents = followed(OLD, saved())
    assert versions(tree) == {
        "ck/meta": ("new", 12),
        "ck/shard0": ("new", 80),
        "ck/shard1": ("new", 80),
    }
    assert contents["start:ck/shard0"] == "kept/old0"
    assert contents["start:ck/meta"] == "kept/old-meta"
    assert contents[tree.files["ck/meta"].version] == "out/ck/meta"
    assert at_the_beginning(OLD, saved()).key == OLD.key


def test_the_second_rank_gone_before_its_shard_leaves_a_mixture() -> None:
    ranks = saved()
    left = left_by(OLD, ranks, point_of(ranks, 1, "open", "ck/shard1"))
    assert versions(left) == {
        "ck/meta": ("old", 10),
        "ck/shard0": ("new", 80),  # rank 0 goes on up to the meeting that needs rank 1
        "ck/shard1": ("old", 100),
    }


def test_between_remove_and_rename_there_is_no_metadata() -> None:
    ranks = saved()
    left = left_by(OLD, ranks, point_of(ranks, 0, "rename", "ck/meta.tmp"))
    assert "ck/meta" not in left.files
    assert versions(left)["ck/meta.tmp"] == ("new", 12)


@pytest.mark.parametrize(("moment", "size"), [(Moment.UNWRITTEN, 0), (Moment.TORN, 40)])
def test_a_file_that_is_being_written_is_empty_or_torn(moment: Moment, size: int) -> None:
    ranks = saved()
    left = left_by(OLD, ranks, point_of(ranks, 1, "fsync", "ck/shard1", moment=moment))
    assert versions(left)["ck/shard1"] == ("new", size)


def test_a_job_killed_as_a_whole_stops_every_rank_at_that_moment() -> None:
    ranks = saved()
    point = point_of(ranks, 0, "open", "ck/shard0", scope=Scope.JOB)
    assert left_by(OLD, ranks, point).key == OLD.key


def test_a_rank_that_only_gives_does_not_wait_for_the_others() -> None:
    """Rank 1 hands its result to rank 0 and goes on to what rank 0 sends; it never comes."""
    ranks = saved(to_root=True)
    gone = point_of(ranks, 0, "open", "ck/meta.tmp")
    left = left_by(OLD, ranks, gone)
    assert versions(left)["ck/shard1"] == ("new", 80)
    assert versions(left)["ck/meta"] == ("old", 10)


def test_every_numbered_event_of_every_rank_is_a_point_for_one_rank_and_for_the_job() -> None:
    ranks = saved()
    numbered = [event for events in ranks for event in events if event.n is not None]
    whole = [point for point in points(ranks) if point.moment is Moment.BEFORE]
    assert len(whole) == 2 * len(numbered) == 22
    assert len({point.id for point in points(ranks)}) == len(list(points(ranks))) == 34


# What the file system does with one event, by the tree before and after it.
Change = Callable[[Tree], None]
STEPS: dict[str, tuple[dict[str, Any], Change]] = {
    "a folder moves with what it holds": (
        {"op": "rename", "path": "ck", "target": "older"},
        lambda tree: _expect(tree, "older/meta", "older/shard0", "older/shard1"),
    ),
    "a file moved out of sight is gone": (
        {"op": "rename", "path": "ck/meta", "target": None},
        lambda tree: _expect(tree, "ck/shard0", "ck/shard1"),
    ),
    "an exclusive open of what is there changes nothing": (
        {"op": "open", "path": "ck/meta", "exclusive": True, "truncates": True},
        lambda tree: _expect_size(tree, "ck/meta", 10),
    ),
    "an appending open keeps the size": (
        {"op": "open", "path": "ck/meta", "truncates": False},
        lambda tree: _expect_size(tree, "ck/meta", 10),
    ),
    "a cut file has the new length": (
        {"op": "truncate", "path": "ck/meta", "length": 3},
        lambda tree: _expect_size(tree, "ck/meta", 3),
    ),
    "a folder that is not empty stays": (
        {"op": "rmdir", "path": "ck"},
        lambda tree: _expect(tree, "ck/meta", "ck/shard0", "ck/shard1"),
    ),
    "an open in a missing folder fails": (
        {"op": "open", "path": "no/file", "truncates": True},
        lambda tree: _expect(tree, "ck/meta", "ck/shard0", "ck/shard1"),
    ),
    "removing what is not there changes nothing": (
        {"op": "remove", "path": "ck/other"},
        lambda tree: _expect(tree, "ck/meta", "ck/shard0", "ck/shard1"),
    ),
}


def _expect(tree: Tree, *names: str) -> None:
    assert sorted(tree.files) == sorted(names)


def _expect_size(tree: Tree, name: str, size: int) -> None:
    assert tree.files[name].size_bytes == size


@pytest.mark.parametrize("name", STEPS)
def test_one_event(name: str) -> None:
    event, check = STEPS[name]
    writer = Writer(0)
    writer.event(**event)
    tree, _ = followed(OLD, events_of(LaunchRecord.made_of("record", tuple(writer.facts), {}, 1)))
    check(tree)
    assert len(OLD.files) == 3


def test_a_link_is_replaced_by_removing_and_making_it() -> None:
    writer = Writer(0)
    writer.event("symlink", "latest", text="step-4")
    writer.event("symlink", "latest", text="refused: it is there")
    writer.event("symlink", "latest.new", text="step-8")
    writer.event("rename", "latest.new", target="latest")
    tree, _ = followed(OLD, events_of(LaunchRecord.made_of("record", tuple(writer.facts), {}, 1)))
    assert tree.links == {"latest": "step-8"}
