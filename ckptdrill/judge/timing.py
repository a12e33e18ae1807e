"""How long a restore, a step and a save took, out of the facts of one launch. Pure.

Nothing here decides a verdict: these are the measured inputs of the ledger. A launch is as slow as
its slowest rank. What the facts cannot tell apart is said to be merged, never split by a guess.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptdrill.model import Fact, JsonValue, LaunchRecord

# What happens inside one call of each kind: nothing in the job divides it.
_IN_ONE_CALL = {
    "load": ("read", "deserialize", "reshard"),
    "torch.load": ("read", "deserialize"),
}
# Between two optimizer steps of the plain loop there is nothing but these.
_PLAIN_LOOP = frozenset({"batch", "stepped", "usage"})


def phases(record: LaunchRecord) -> Mapping[str, JsonValue]:
    """Seconds of the phases of a restore, of the slowest rank; empty when no rank came to a batch.

    `read` is the time inside load calls, `validate` that of the fingerprints of the restored state
    (they are the drill's, no job pays them), `initialize` the rest from the start of the process to
    its first batch. `merged` are the phases that one call does together; all of them are in `read`.
    """
    began = {fact.rank: fact for fact in reversed(record.of("started"))}
    derived = record.derived_from("batch", "load_end", "state")
    by_rank = derived.once("until the first batch", lambda: _until_batch(record))
    ranks = [_of_rank(record, began[rank], by_rank[rank]) for rank in by_rank if rank in began]
    if not ranks:
        return {}
    names = ("read", "initialize", "validate")
    slowest = zip(names, max(ranks, key=sum), strict=True)
    return {
        **{name: round(seconds, 6) for name, seconds in slowest},
        "merged": _merged(record.of("load_end")),
    }


class _UntilBatch(NamedTuple):
    """A rank's first batch, the loads that ended, and the states that were sampled before a step:
    those as the process made them, and the others.
    """

    batch: Fact
    loads: Sequence[Fact]
    made: Sequence[Fact]
    restored: Sequence[Fact]


def _until_batch(record: LaunchRecord) -> Mapping[int, _UntilBatch]:
    """By rank, for the ranks that came to a batch."""
    loads = _of_ranks(record.of("load_end"))
    sampled = _of_ranks(fact for fact in record.of("state") if fact.step == 0)
    found = {}
    for rank, batches in _of_ranks(record.of("batch")).items():
        states = sampled.get(rank, ())
        made = [fact for fact in states if fact.data.get("at") == "made"]
        restored = [fact for fact in states if fact.data.get("at") != "made"]
        found[rank] = _UntilBatch(batches[0], loads.get(rank, ()), made, restored)
    return found


def _of_ranks(facts: Iterable[Fact]) -> Mapping[int, Sequence[Fact]]:
    """Facts that stand rank by rank, by their rank."""
    return {rank: tuple(found) for rank, found in itertools.groupby(facts, lambda f: f.rank)}


def _of_rank(record: LaunchRecord, started: Fact, until: _UntilBatch) -> tuple[float, float, float]:
    """Seconds of reading, of the rest, and of validating."""
    began, ended = record.t(started), record.t(until.batch)
    load_s = sum((record.took_s(fact) for fact in until.loads if record.t(fact) <= ended), 0.0)
    validate_s = sum(map(record.took_s, until.restored), 0.0)
    idle_s = sum(map(record.took_s, until.made), load_s + validate_s)
    return load_s, max(ended - began - idle_s, 0.0), validate_s


def _merged(loads: tuple[Fact, ...]) -> list[JsonValue]:
    together = {name for f in loads for name in _IN_ONE_CALL.get(str(f.data.get("call")), ())}
    return [name for name in _IN_ONE_CALL["load"] if name in together]


def step_s(record: LaunchRecord | None) -> float | None:
    """Median seconds from one optimizer step to the next, of the slowest rank.

    Only steps of the plain loop count: no save and no sampling of the observer between them. None
    where there is no such pair.
    """
    if record is None:
        return None
    return record.derived.once("step_s", lambda: _step_s(record))


def _step_s(record: LaunchRecord) -> float | None:
    medians = [
        statistics.median(found)
        for facts in _of_ranks(record.facts).values()
        if (found := list(_plain_steps(record, facts)))
    ]
    return round(max(medians), 6) if medians else None


def _plain_steps(record: LaunchRecord, facts: Iterable[Fact]) -> Iterator[float]:
    last: Fact | None = None
    for fact in facts:
        if fact.kind == "stepped":
            if last is not None and fact.step == last.step + 1:
                yield record.t(fact) - record.t(last)
            last = fact
        elif fact.kind not in _PLAIN_LOOP:
            last = None


def save(record: LaunchRecord, step: int | None, start_step: int) -> Mapping[str, JsonValue]:
    """The save of the checkpoint under drill, at the source's own local `step`; empty if unseen.

    `step` in the job's count, which began at `start_step`; `call`; `duration_s` of the slowest
    rank; and `ended_s`, the time (seconds since 1970) when the last rank came back from it. An
    asynchronous call comes back when it has staged.
    """
    key = ("save", step, start_step)
    return record.derived.once(key, lambda: _save(record, step, start_step))


def _save(record: LaunchRecord, step: int | None, start_step: int) -> Mapping[str, JsonValue]:
    ends = [fact for fact in record.of("save_end") if fact.step == step]
    if not ends or step is None:
        return {}
    return {
        "step": start_step + step,
        "call": str(ends[-1].data.get("call")),
        "duration_s": max(map(record.took_s, ends)),
        "ended_s": max(map(record.t, ends)),
    }
