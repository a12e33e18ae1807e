"""Ranks that part: what each did where they should have done the same, in place of the last words
of the transport.

Asked only of a restored run that did not end well. Each rank is told by what it loaded, by the
saved step whose weights it came to its first forward with, and by how far it trained. They have
parted when one rank began with the weights of another step than that of the checkpoint, and another
read the checkpoint, or began with another step. A rank that is sent what rank 0 reads begins with
the same weights, so its loading nothing says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptdrill.columns import Part
from ckptdrill.judge.logical import is_entry
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Fact, JsonValue

_SHOWN = 4  # groups of ranks


@dataclass(frozen=True)
class Parting:
    """What each rank did, in words; the ranks that went astray, and the facts that say so."""

    text: str
    astray: tuple[int, ...]
    facts: tuple[str, ...]


@dataclass(frozen=True)
class _Did:
    """What a rank did."""

    call: str | None  # with which it read the checkpoint
    began_at: int | None  # the saved step whose weights it had; None where that is not known
    trained: int  # steps in this process
    came: bool  # to its first forward


def parting(pair: Pair) -> Parting | None:
    """How the ranks of the restored run parted, if it is certain that they did."""
    record = pair.restored.record
    did = {rank: _did(pair, rank) for rank in range(record.world_size)}
    at = pair.restore_step
    known = {rank: each.began_at for rank, each in did.items() if each.began_at is not None}
    astray = tuple(rank for rank, step in known.items() if step != at)
    others = [rank for rank in did if rank not in astray]
    loaded = any(did[rank].call or known.get(rank) == at for rank in others)
    if not astray or not (loaded or len(set(known.values())) > 1):
        return None
    groups: dict[_Did, list[int]] = {}
    for rank, each in did.items():
        groups.setdefault(each, []).append(rank)
    told = [f"{_ranks(ranks)} {_words(each, at)}" for each, ranks in groups.items()]
    facts = [fact for kind in ("load_begin", "stepped") for fact in record.of(kind)[:2]]
    text = ", ".join(told[:_SHOWN])
    return Parting(f"the ranks part: {text}", astray, record.refs(facts))


def _did(pair: Pair, rank: int) -> _Did:
    record = pair.restored.record
    loads = [fact for fact in record.of("load_begin", rank) if fact.step == 0]
    state = [f for f in pair.restored.sample("state", pair.restored.offset) if f.rank == rank]
    trained = max((fact.step for fact in record.of("stepped", rank)), default=0)
    return _Did(
        str(loads[0].data["call"]) if loads else None,
        _began_at(pair, state[0]) if state else None,
        trained,
        bool(state or trained or record.of("batch", rank)),
    )


def _began_at(pair: Pair, state: Fact) -> int | None:
    """The one sampled step of the source whose weights a rank had before its first step."""
    run = pair.reference
    steps = [s for s in run.sampled_steps() if s <= pair.restore_step]
    found = [step for step in steps if _are_those_of(run, step, state.data["weights"])]
    return found[0] if len(found) == 1 else None


def _are_those_of(run: Trajectory, step: int, weights: Mapping[str, JsonValue] | Part) -> bool:
    held: dict[str, list[JsonValue]] = {}
    for fact in run.sample("state", step):
        for name, entry in fact.data["weights"].items():
            held.setdefault(name, []).append(entry)
    tensors = {name: entry for name, entry in weights.items() if is_entry(entry)}
    return bool(tensors) and all(entry in held.get(name, ()) for name, entry in tensors.items())


def _words(did: _Did, at: int) -> str:
    read = f"called {did.call}" if did.call else "never loaded a checkpoint"
    if not did.came:
        return f"{read} and never came to a step"
    trained = f"trained for {did.trained} steps" if did.trained != 1 else "trained for 1 step"
    begun = f" and {trained if did.trained else 'began to train'}"
    if did.began_at is None:
        return read + begun
    whence = "the start" if did.began_at == 0 else f"step {did.began_at}"
    return f"{read}{begun} from {whence}" + ("" if did.began_at == at else f", not step {at}")


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
