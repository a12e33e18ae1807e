"""Say what a broken item equals instead: the difference between an alarm and an explanation.

The facts hold digests of many alternatives: the same tensor at other steps, other tensors, what
stood there before anything was restored, what a load put in place, other saved leaves, other ranks.
Each function returns one clause for the first problem it can explain, or nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from msgspec import structs

from ckptdrill.judge import averages, ends
from ckptdrill.judge.inventory import collapsed, saved_at, unread
from ckptdrill.judge.logical import Logical, combine, is_entry
from ckptdrill.judge.state import sampled
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Check, Fact, Held, Item, JsonValue

_SHOWN = 6
_VARIABLES_SHOWN = 12
_SUM = re.compile(r"sum\(")  # of a list or a tensor
_CLOCK = re.compile(r"(^|[._\[])(t\d?|\w*time\w*|start\w*|began|tic|now|clock)\]?$", re.IGNORECASE)
_PARTS = {Item.WEIGHTS: "weights", Item.BUFFERS: "buffers", Item.MOMENTS: "optimizer"}


def explained(check: Check, pair: Pair) -> Check:
    """`check` with an explanation in its summary and details, where there is one."""
    if check.status is not Held.BROKEN:
        return check
    if check.item in (Item.GRADIENTS, Item.UPDATES) and pair.goes_on_inside:
        return _pending(check, pair)
    if check.item is Item.DATA and (made := _made_otherwise(check, pair)):
        return made
    clauses = list(_clauses(check, pair))
    if not clauses:
        return check
    return replace(
        check, summary=f"{check.summary}; {clauses[0]}", details=(*clauses, *check.details)
    )


def _clauses(check: Check, pair: Pair) -> Iterable[str]:
    if check.item in _PARTS:
        yield from _tensor_clauses(check, pair, _PARTS[check.item])
    elif check.item is Item.SCHEDULER:
        yield from _scheduler_clauses(pair)
    elif check.item is Item.HYPERPARAMETERS:
        yield from _hyperparameter_clauses(pair)
    elif check.item is Item.RNG:
        yield from _rng_clauses(pair)
    elif check.item is Item.DATA:
        yield from _data_clauses(pair)
    elif check.item in (Item.GRADIENTS, Item.UPDATES, Item.LOSS) or ends.is_end(check):
        yield from _variable_clauses(pair)
    if check.item in (Item.WEIGHTS, Item.RNG, Item.DATA):
        yield from collapsed(pair)
        keys = unread(pair)
        if keys:
            yield f"saved but never read: {', '.join(keys[:_SHOWN])}"


def _tensor_clauses(check: Check, pair: Pair, part: str) -> Iterable[str]:
    source = combine(pair.reference.sample("state", pair.restore_step), part)
    target = combine(pair.restored.sample("state", pair.restore_step), part)
    wrong = [name for name in check.subjects if name in source and name in target]
    yield from _prefix(pair)
    yield from _swapped(wrong, source, target)
    clauses = (
        _overwritten(wrong, source, pair, part),
        _steps_by_rank(wrong, pair, part),
        _other_step(wrong, target, pair, part),
        _untouched(wrong, target, pair, part),
        _other_leaf(wrong, target, pair),
    )
    # What was overwritten may still be told by what it equals now.
    yield from [clause for clause in clauses if clause][:2]


def _prefix(pair: Pair) -> Iterable[str]:
    """A non-strict load under other names: the keys that did not fit tell by what."""
    for fact in pair.restored.record.of("restored"):
        unexpected, missing = fact.data.get("unexpected", []), fact.data.get("missing", [])
        if not unexpected or not missing:
            continue
        for key in missing:
            prefix = next(
                (u[: -len(key)] for u in unexpected if u.endswith(key) and u != key), None
            )
            if prefix:
                yield (
                    f"{len(unexpected)} keys of the checkpoint did not fit and {len(missing)} of "
                    f"the model were not filled: the stored keys carry the prefix `{prefix}`"
                )
                return
        counts = f"{len(unexpected)} stored keys did not fit"
        yield f"{counts}, {len(missing)} of the model were not filled"
        return


def _swapped(
    wrong: Sequence[str], source: Mapping[str, Logical], target: Mapping[str, Logical]
) -> Iterable[str]:
    for name in wrong:
        for other in wrong:
            same = (
                source[name].digest == target[other].digest
                and source[other].digest == target[name].digest
            )
            if name < other and same and source[name].shape:
                yield f"{name} and {other} are swapped"


def _overwritten(
    wrong: Sequence[str], source: Mapping[str, Logical], pair: Pair, part: str
) -> str | None:
    """State was right when a load put it there, and wrong at the first step."""
    put = [
        f
        for f in pair.restored.record.of("restored")
        if f.data["part"] == ("optimizer" if part == "optimizer" else "weights")
    ]
    values = [structs.replace(f, data={part: f.data["values"]}) for f in _last_per_rank(put)]
    loaded = combine(values, part)
    right = [
        n
        for n in wrong
        if n in loaded
        and loaded[n].digest == source[n].digest
        and not (source[n].replicas_differ or loaded[n].replicas_differ)
    ]
    never = pair.restored.silent(put)
    if right and never:
        return f"rank {never[0]} never restored {_count(right)}"
    if right:
        return f"{_count(right)} was restored, then overwritten before the first step"
    return None


def _other_step(
    wrong: Sequence[str], target: Mapping[str, Logical], pair: Pair, part: str
) -> str | None:
    for step in reversed(pair.reference.sampled_steps()):
        if step == pair.restore_step:
            continue
        then = combine(pair.reference.sample("state", step), part)
        same = [
            n for n in wrong if n in then and then[n].digest == target[n].digest and then[n].shape
        ]
        if same:
            return f"{_count(same)} equals step {step}, the checkpoint is step {pair.restore_step}"
    return None


def _steps_by_rank(wrong: Sequence[str], pair: Pair, part: str) -> str | None:
    """Ranks that hold different steps: a generation put together from two.

    A rank that has nothing of what is wrong, as with flat partitions, says nothing.
    """
    reference, ranks = pair.reference, pair.restored.sample("state", pair.restore_step)
    of_states = reference.derived_from("state")
    then = of_states.once(("by rank", part), lambda: _by_rank(reference, part))
    held = {
        fact.rank: _step_on_rank(mine, fact.rank, then)
        for fact in ranks
        if (mine := _held_of(wrong, fact, part))
    }
    steps = set(held.values())
    alone = len(held) < len(ranks) and steps != {pair.restore_step}
    if not steps or None in steps or (len(steps) < 2 and not alone):
        return None
    return ", ".join(f"rank {rank} holds step {step}" for rank, step in sorted(held.items()))


def _by_rank(run: Trajectory, part: str) -> Mapping[int, Mapping[int, JsonValue]]:
    """A part of the state at every sampled step, the newest first, by rank."""
    return {
        step: {fact.rank: fact.data.get(part, {}) for fact in run.sample("state", step)}
        for step in reversed(run.sampled_steps())
    }


def _held_of(names: Sequence[str], now: Fact, part: str) -> Mapping[str, JsonValue]:
    """The entries of these tensors that a rank has; the digest of none, or of zeros, is 0."""
    mine = now.data.get(part, {})
    entries = {n: mine[n] for n in names if n in mine and is_entry(mine[n])}
    return {n: entry for n, entry in entries.items() if entry[1] and entry[4].strip("0")}


def _step_on_rank(
    mine: Mapping[str, JsonValue], rank: int, then: Mapping[int, Mapping[int, JsonValue]]
) -> int | None:
    """The newest step at which the source run held on this rank what is there now. `then` has, by
    step, newest first, and by rank, the leaves of the part.
    """
    for step, leaves in then.items():
        theirs = leaves.get(rank, {})
        moving = [name for name in mine if name in theirs]
        if moving and all(mine[name] == theirs[name] for name in moving):
            return step
    return None


def _untouched(
    wrong: Sequence[str], target: Mapping[str, Logical], pair: Pair, part: str
) -> str | None:
    made = combine(_made(pair), part)
    same = [n for n in wrong if n in made and made[n].digest == target[n].digest]
    if not same:
        return None
    frozen = f" ({same[0]} is frozen)" if part == "weights" and _frozen(same[0], pair) else ""
    return f"{_count(same)} stands as the process initialised it: it was not restored{frozen}"


def _frozen(name: str, pair: Pair) -> bool:
    return any(name in f.data.get("frozen", ()) for f in pair.restored.record.of("roots"))


def _other_leaf(wrong: Sequence[str], target: Mapping[str, Logical], pair: Pair) -> str | None:
    """Another saved leaf was put in its place: the average of the weights, say."""
    by_digest = _saved_leaves(pair.reference, pair.restore_step)
    for name in wrong:
        key = by_digest.get(target[name].digest, "")
        if key:
            return f"{name} equals the saved leaf `{key}`"
    return None


def _saved_leaves(run: Trajectory, step: int) -> Mapping[str, str]:
    """Digest -> the first key under which the save of that step has it."""

    def by_digest() -> Mapping[str, str]:
        found: dict[str, str] = {}
        for key, values in saved_at(run, step).leaves.items():
            for value in values:
                if isinstance(value, dict) and is_entry(value.get("entry")):
                    found.setdefault(value["entry"][4], key)
        return found

    return run.derived.once(("by digest", step), by_digest)


def _scheduler_clauses(pair: Pair) -> Iterable[str]:
    state = sampled(pair)
    source, target = _schedulers(state.source), _schedulers(state.target)
    for before, after in zip(source, target, strict=False):
        if before["drives"] != after["drives"] and after["drives"] != -1:
            yield "the schedule drives another optimizer than in the source run"
        a, b = before["state"].get("last_epoch"), after["state"].get("last_epoch")
        if not isinstance(a, int) or not isinstance(b, int) or a == b:
            continue
        if b == 0:
            yield "the scheduler starts again at its beginning"
        elif b == 2 * a:
            yield f"the scheduler was advanced twice: it stands at {b}, not {a}"
        else:
            yield f"the scheduler is {abs(b - a)} steps {'ahead' if b > a else 'behind'}"
    if any(after["drives"] == -1 for after in target):
        yield "the schedule drives another optimizer: one that never steps"


def _hyperparameter_clauses(pair: Pair) -> Iterable[str]:
    made, target = _made(pair), pair.restored.sample("state", pair.restore_step)
    if made and target and _hypers(made) == _hypers(target):
        yield "the groups stand as the constructor left them"


def _data_clauses(pair: Pair) -> Iterable[str]:
    """Which of the reference's steps the restored run really went on with."""
    if not pair.compared:
        return
    found = _rows(pair.restored, pair.compared[0])
    for step in sorted(pair.reference.batches):
        if step != pair.compared[0] and found and _rows(pair.reference, step) == found:
            first = min(pair.reference.batches)
            where = "the beginning of the data" if step == first else f"the batches of step {step}"
            yield f"the restored run continues with {where}"
            return


def _pending(check: Check, pair: Pair) -> Check:
    """A save between two micro-batches, after which the job goes on with the next: what it had
    summed up by then is the first thing to be missing.
    """
    what = f"the gradients of {pair.goes_on_inside} samples were pending at the save and are lost"
    subjects = ("pending gradients", *check.subjects)
    return replace(check, summary=f"{what}: {check.summary}", subjects=subjects)


def _made_otherwise(check: Check, pair: Pair) -> Check | None:
    """Where the samples are the reference's and the model is given something else: what makes its
    input of them (a running normalisation, say) is to blame, and no position in the data.
    """
    raw = _samples_held(pair)
    others = [told for told in _held_otherwise(pair) if not _SUM.match(told)]
    if not raw or not others:
        return None
    return replace(
        check,
        summary=f"the samples are the same (`{raw}` is), and what the model is given is not: "
        f"{'; '.join(others[:_VARIABLES_SHOWN])}",
        subjects=(_called(others[0]),),
    )


def _samples_held(pair: Pair) -> str | None:
    """A tensor of the script's that goes up and down with the samples, and is the reference's on
    every rank both at the restore and one step on, when everything else is already another.
    """
    steps = pair.reference.sampled_steps()
    after = [step for step in steps if step in (pair.restore_step, pair.restore_step + 1)]
    if pair.reference.record.world_size != pair.restored.record.world_size or len(after) < 2:
        return None
    wanted = [_values(pair.reference, step) for step in steps]
    pairs = [(_values(pair.reference, step), _values(pair.restored, step)) for step in after]
    for name in pairs[0][0].get(0, {}):
        told = [held[0][name] for held in wanted if name in held.get(0, {})]
        same = all(
            rank in now and now[rank].get(name) == values.get(name) is not None
            for then, now in pairs
            for rank, values in then.items()
        )
        if same and _SUM.match(name) and _goes_up_and_down(told):
            return name[len("sum(") : -1]
    return None


def _values(run: Trajectory, step: int) -> Mapping[int, Mapping[str, float]]:
    """Rank -> name -> number, of the script's own variables at a step."""
    return {fact.rank: fact.data["values"] for fact in run.sample("variables", step)}


def _goes_up_and_down(numbers: Sequence[float]) -> bool:
    ways = [after > before for before, after in pairwise(numbers) if after != before]
    return len(set(ways)) > 1


def _rows(run: Trajectory, step: int) -> Counter[str]:
    return Counter(row for rows in run.rows(step).values() for row in rows)


def _variable_clauses(pair: Pair) -> Iterable[str]:
    """What the script's own variables held before the first step, where no checkpoint held it."""
    told = _held_otherwise(pair)
    if told:
        shown = "; ".join(told[:_VARIABLES_SHOWN])
        yield f"of the script's own variables these were others before that step: {shown}"


def other_before(pair: Pair) -> frozenset[str]:
    """What the script's own variables are called that were others before the first step."""
    return frozenset(_called(text) for text in _held_otherwise(pair))


def _held_otherwise(pair: Pair) -> list[str]:
    """In words that begin with the name. What several frames hold is told once."""
    told = averages.held_otherwise(pair)
    if pair.reference.record.world_size == pair.restored.record.world_size:
        told += _other_variables(pair)
    once: dict[tuple[str, str], str] = {}
    for text in told:
        once.setdefault((_called(text), text.partition(" ")[2]), text)
    return list(once.values())


def _called(text: str) -> str:
    """`norms` of `len(Trainer.norms) is 0`: the last name in the first word."""
    *_, last = re.findall(r"\w+", text.partition(" ")[0])
    return str(last)


def _other_variables(pair: Pair) -> list[str]:
    """Numbers that differ on some rank; on another number of ranks some do for that reason."""
    runs = (pair.reference, pair.restored)
    then, now = (_values(run, pair.restore_step) for run in runs)
    return [
        f"{name} is {now[rank][name]:g}, the reference has {value:g}"
        for rank in sorted(then.keys() & now.keys())
        for name, value in then[rank].items()
        if now[rank].get(name, value) != value and not _CLOCK.search(name)
    ]


def _rng_clauses(pair: Pair) -> Iterable[str]:
    reference = {f.rank: f.data["kinds"] for f in pair.reference.sample("rng", pair.restore_step)}
    for now in pair.restored.sample("rng", pair.restore_step):
        wanted = reference.get(now.rank)
        if wanted is None or now.data["kinds"] == wanted:
            continue
        others = [
            r for r, kinds in reference.items() if r != now.rank and kinds == now.data["kinds"]
        ]
        if others:
            yield f"rank {now.rank} holds the state of rank {others[0]}"
            return
        yield from _reseeded(pair, now, wanted)
        return


def _reseeded(pair: Pair, now: Fact, wanted: Mapping[str, str]) -> Iterable[str]:
    calls = pair.restored.record.of("rng_set", now.rank)
    for kind in (k for k in wanted if now.data["kinds"].get(k) != wanted[k]):
        right = [i for i, f in enumerate(calls) if f.data["kinds"].get(kind) == wanted[kind]]
        if right:
            later = [
                f.data["by"]
                for f in calls[right[-1] + 1 :]
                if f.data["kinds"].get(kind) != wanted[kind]
            ]
            what = (
                f"overwritten by {later[0]}"
                if later
                else "drawn from again (making a loader's iterator draws, too)"
            )
            yield f"{kind} on rank {now.rank} was restored, then {what} before the first step"
            return
    if not any(f.data["by"].endswith(("setstate", "set_state", "set_rng_state")) for f in calls):
        yield "no generator state was ever put back"


def _made(pair: Pair) -> tuple[Fact, ...]:
    return pair.restored.sample("state", pair.restore_step, "made")


def _schedulers(facts: Sequence[Fact]) -> list[Mapping[str, Any]]:
    return list(facts[0].data.get("schedulers", [])) if facts else []


def _hypers(facts: Sequence[Fact]) -> list[object]:
    return [group["hyper"] for optimizer in facts[0].data["groups"] for group in optimizer]


def _last_per_rank(facts: Sequence[Fact]) -> list[Fact]:
    return list({f.rank: f for f in facts}.values())


def _count(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (with {len(names) - 1} more)"
