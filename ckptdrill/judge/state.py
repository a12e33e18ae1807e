"""Judge what was restored before the first update: names, weights, buffers, moments,
hyper-parameters.

Resharding only moves bytes, so the rule is bitwise equality of every logical tensor between the
source run and the restored run at the first forward after the checkpoint. Each function returns one
row of the inventory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from ckptdrill.columns import Part
from ckptdrill.judge import leftovers, parts
from ckptdrill.judge.inventory import saved_at
from ckptdrill.judge.logical import Logical, combine, is_entry, quoted
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Check, Cut, Derived, Fact, Held, Item, JsonValue

# How the observer names the state of other optimizers than the first (observer/state.py).
_NUMBERED = re.compile(r"optimizer(\d+):(.+)", re.DOTALL)
_SHOWN = 12  # subjects listed in a row; the count is always given


@dataclass(frozen=True)
class Sampled:
    """The sampled state of both runs at the restored step."""

    source: tuple[Fact, ...]
    target: tuple[Fact, ...]
    lost: str | None = None  # a rank without a sample: what it held is unknown, not different
    refs: tuple[str, ...] = ()  # the facts compared, as a verdict cites them
    derived: Derived = field(default_factory=Derived)  # what follows from source and target
    given: parts.Given = field(default_factory=parts.Given)  # what is told of how parts fit

    @property
    def missing(self) -> str | None:
        """What is missing for a comparison, in words."""
        if not self.source:
            return "the source run's state at the restored step was not recorded"
        if not self.target:
            return "the restored run's state before its first step was not recorded"
        return self.lost

    @property
    def on_other_stages(self) -> bool:
        """Whether parameters have moved between ranks, as they do with the pipeline degree."""
        return self.derived.once("on other stages", self._on_other_stages)

    def _on_other_stages(self) -> bool:
        source, target = (
            {_names(fact.data["weights"]) for fact in facts} for facts in (self.source, self.target)
        )
        return source != target and max(len(source), len(target)) > 1


def sampled(
    pair: Pair, declared: Mapping[str, Cut] | None = None, control: Trajectory | None = None
) -> Sampled:
    """State at the first forward after the restored step, in both runs. `declared` is what the
    owner says of parts, by glob; `control` shows how the job itself cuts what the source begins
    with.
    """
    runs = (pair.reference, pair.restored)
    whole = [_of_stepping(run, run.sample("state", pair.restore_step)) for run in runs]
    source, target = leftovers.taken_off(pair, whole[0], whole[1])
    lost = [
        f"rank {rank} of {run.record.launch_id} recorded no state at the restored step"
        for run, facts in zip(runs, (source, target), strict=True)
        for rank in run.silent(facts)[:1]
    ]
    refs = pair.reference.record.refs(source) + pair.restored.record.refs(target)
    derived = pair.derived_from("state", "stepped")
    given = parts.Given(
        saved_at(pair.reference, pair.restore_step).facts,
        declared or {},
        _stated(pair),
        _begun(pair, control) if control is not None else {},
    )
    return Sampled(source, target, lost[0] if lost else None, refs, derived, given)


def _begun(pair: Pair, control: Trajectory) -> Mapping[str, frozenset[str]]:
    """How the weights that source and control begin with fit together, by name."""
    first = pair.reference.offset
    one, other = (run.sample("state", first) for run in (pair.reference, control))
    return parts.fit(one, other, "weights", combine(one, "weights").keys()).ways


def _stated(pair: Pair) -> Mapping[str, int]:
    """Parameter -> the dimension along which its framework says that it has cut it."""
    return {
        name: dim
        for run in (pair.reference, pair.restored)
        for fact in run.sample("roots", pair.restore_step)
        for name, (dim, stride) in fact.data.get("cut", {}).items()
        if stride == 1
    }


def _of_stepping(run: Trajectory, facts: tuple[Fact, ...]) -> tuple[Fact, ...]:
    """The sampled state without optimizers that never step, the others renumbered.

    An optimizer that was replaced by another may still be alive, because a scheduler holds it.
    """
    optimizers = (f.data["optimizer"] for f in run.record.of("stepped"))
    stepping = run.derived_from("stepped").once("stepping", lambda: sorted(set(optimizers)))
    known = range(max((len(f.data["groups"]) for f in facts), default=0))
    if not stepping or list(known) == stepping or not set(stepping) <= set(known):
        return facts
    return tuple(structs.replace(fact, data=_renumbered(fact.data, stepping)) for fact in facts)


def _renumbered(data: Mapping[str, JsonValue], stepping: list[int]) -> Mapping[str, JsonValue]:
    place = {old: new for new, old in enumerate(stepping)}
    state = {}
    for name, value in data["optimizer"].items():
        numbered = _NUMBERED.fullmatch(name)
        old, rest = (int(numbered[1]), numbered[2]) if numbered else (0, name)
        if old in place:
            state[f"optimizer{place[old]}:{rest}" if place[old] else rest] = value
    schedulers = [{**s, "drives": place.get(s["drives"], -1)} for s in data["schedulers"]]
    groups = [data["groups"][old] for old in stepping]
    return {**data, "optimizer": state, "groups": groups, "schedulers": schedulers}


def keys(state: Sampled) -> Check:
    """The live model must have the same names, shapes and dtypes in both runs."""
    if state.missing:
        return _unobserved(Item.KEYS, state)
    problems: list[str] = []
    unknown: list[str] = []
    count = 0
    for part in ("weights", "buffers"):
        source, target = combine(state.source, part), combine(state.target, part)
        count += len(source)
        fit = _fit(state, part)
        problems += [p for p in _key_problems(source, target) if _subject(p) not in fit.names]
        unknown += fit.unknown
    if not count:
        return Check(Item.KEYS, Held.NOT_OBSERVED, "no parameter or buffer was found in the job")
    held = f"{count} names with equal shape and dtype"
    row = _row(Item.KEYS, problems, held, state.refs, in_parts=unknown)
    dtypes = Counter(each.dtype for each in combine(state.source, "weights").values())
    return replace(row, numbers={"parameter_dtypes": dict(sorted(dtypes.items()))})


def weights(state: Sampled) -> Check:
    """Parameters, frozen and tied ones included."""
    return _tensors(Item.WEIGHTS, state, "weights", "parameters bitwise equal")


def buffers(state: Sampled) -> Check:
    """Buffers, non-persistent ones included: they are in no state dict, but in every forward."""
    if _broadcast(state):
        first = replace(state, source=state.source[:1], target=state.target[:1])
        return _tensors(Item.BUFFERS, first, "buffers", "buffers bitwise equal on the first rank")
    return _tensors(Item.BUFFERS, state, "buffers", "buffers bitwise equal")


def _broadcast(state: Sampled) -> bool:
    """DistributedDataParallel sends the first rank's buffers to all others before each forward."""
    return bool(state.target) and all(
        f.data.get("broadcast_buffers", False) for f in (*state.source, *state.target)
    )


def moments(state: Sampled) -> Check:
    """Optimizer state by parameter name; a fresh optimizer shows as everything missing."""
    if state.missing:
        return _unobserved(Item.MOMENTS, state)
    source, target = combine(state.source, "optimizer"), combine(state.target, "optimizer")
    if not source and not target:
        return Check(Item.MOMENTS, Held.HELD, "the optimizer keeps no state", facts=state.refs)
    fit = _fit(state, "optimizer")
    lost = sorted(set(source) - set(target) - fit.names)
    problems, unknown = state.derived.once("moments", lambda: _moment_problems(state))
    problems = _without_parts(problems, fit)
    held = f"{len(source)} entries equal, by parameter name"
    check = _row(Item.MOMENTS, problems, held, state.refs, unknown, fit.unknown)
    kept = [name for name in source if is_master(name)]
    if lost and len(lost) == len(source) - len(kept):
        beside = " but the master weights" if kept else ""
        summary = f"all {len(lost)} entries of the source{beside} are missing: a fresh optimizer"
        return replace(check, summary=summary)
    return check


def _moment_problems(state: Sampled) -> tuple[list[str], list[str]]:
    """What differs, and what is not wholly recorded."""
    source, target = combine(state.source, "optimizer"), combine(state.target, "optimizer")
    problems = _key_problems(source, target) + _value_problems(source, target)
    return problems + _missing_on_a_rank(state), _incomplete(source, target)


def is_master(name: str) -> bool:
    """True for the float32 copies of weights that DeepSpeed steps on: they are there before any
    moment is.
    """
    return name.endswith(".fp32")


def _missing_on_a_rank(state: Sampled) -> list[str]:
    """Entries that a rank held in the source and does not hold now, though another rank may."""
    if len(state.source) != len(state.target) or state.on_other_stages:
        return []
    return [
        f"{name} is missing on rank {after.rank} after the restore"
        for before, after in zip(state.source, state.target, strict=True)
        for name in _lacking(before.data["optimizer"], after.data["optimizer"])
        if any(name in other.data["optimizer"] for other in state.target)
        and not _holds_nothing(after, name)
    ]


def _lacking(before: Mapping[str, JsonValue], after: Mapping[str, JsonValue]) -> Collection[str]:
    if isinstance(before, Part) and isinstance(after, Part) and before.layout is after.layout:
        return ()
    return sorted(before.keys() - after.keys())


def _holds_nothing(fact: Fact, name: str) -> bool:
    """Whether a flat partition leaves this rank no element of the parameter of an optimizer's
    entry: then its optimizer has none for it either.
    """
    parameter = name.rpartition(":")[2].rpartition(".")[0]
    entry = fact.data["weights"].get(parameter)
    return is_entry(entry) and entry[3] == [0]


def hyperparameters(state: Sampled, frozen: Sequence[str] = ()) -> Check:
    """Membership and values of every group except `lr`, which the LR trace judges as it is used.

    `frozen` is what `freezing` found.
    """
    if state.missing:
        return _unobserved(Item.HYPERPARAMETERS, state)
    problems: list[str] = [*frozen]
    apart = _fit(state, "weights").names  # experts that each rank numbers anew, say
    by_rank = _whole_groups if state.on_other_stages else _groups_by_rank
    pairs = state.derived.once("groups", lambda: by_rank(state))
    for rank, before, after in pairs:
        source, target = _groups(before), _groups(after)
        if not source:
            what = "no optimizer was found in the job"
            return Check(Item.HYPERPARAMETERS, Held.NOT_OBSERVED, what)
        if len(source) != len(target):
            problems.append(
                f"parameter groups: {len(source)} in the source, {len(target)} after the restore"
            )
        for number, (one, other) in enumerate(zip(source, target, strict=False)):
            problems += [f"{p}{_on(rank)}" for p in _group_problems(number, one, other, apart)]
    count = len(_groups(state.source[0].data["groups"]))
    equal = f"{count} group{'' if count == 1 else 's'} equal"
    return _row(Item.HYPERPARAMETERS, problems, equal, state.refs)


def freezing(pair: Pair) -> list[str]:
    """Parameters of the trained model that are frozen in one run and trained in the other."""
    runs = (pair.reference, pair.restored)
    then, now = (_frozen(run, pair.restore_step) for run in runs)
    if then is None or now is None or then == now:
        return []
    in_both = set.intersection(*(_named(run, pair.restore_step) for run in runs))
    return [
        f"{name} is frozen after the restore, the reference trains it"
        if name in now
        else f"{name} is trained after the restore, the reference keeps it frozen"
        for name in sorted((then ^ now) & in_both)
    ]


def _frozen(run: Trajectory, step: int) -> frozenset[str] | None:
    """The parameters that are frozen on any rank; None where that was not recorded."""

    def frozen() -> frozenset[str] | None:
        roots = run.sample("roots", step)
        names = frozenset(name for fact in roots for name in fact.data.get("frozen", ()))
        return names if roots else None

    return run.derived_from("roots").once(("frozen", step), frozen)


def _named(run: Trajectory, step: int) -> set[str]:
    """The parameters of the first model; those of others carry its name and a colon."""
    states = run.sample("state", step)
    return {name for fact in states for name in fact.data["weights"] if ":" not in name}


def group_learning_rates(state: Sampled) -> tuple[str, ...]:
    """Groups whose `lr` differs at the first forward; empty when none or not observed."""
    if state.missing:
        return ()
    return tuple(
        f"param_groups[{n}].lr is {b['hyper'].get('lr')}, "
        f"the reference has {a['hyper'].get('lr')}{_on(rank)}"
        for rank, source, target in _by_rank(state, "groups")
        for n, (a, b) in enumerate(zip(_groups(source), _groups(target), strict=False))
        if a["hyper"].get("lr") != b["hyper"].get("lr")
    )


def scaler_differences(state: Sampled) -> list[str]:
    """Differences between the loss scalers' own states, in words."""
    return _differences_by_rank(state, "scalers", "scaler")


def scheduler_state(state: Sampled) -> tuple[str, ...]:
    """Differences between the schedulers' own states, in words; empty when equal or unobserved."""
    if state.missing:
        return ()
    return tuple(_differences_by_rank(state, "schedulers", "scheduler"))


def matching_step(
    restored: Trajectory, reference: Trajectory, at: int, candidates: Iterable[int]
) -> int | None:
    """The other saved step whose whole state the restored run came back with, if there is one."""
    target = restored.sample("state", at)
    for step in candidates:
        state = Sampled(reference.sample("state", step), target)
        rows = (row(state) for row in (weights, keys, buffers, moments))
        if all(row.status is Held.HELD for row in rows):
            return step
    return None


def differences(path: str, source: JsonValue, target: JsonValue) -> list[str]:
    """Every leaf that differs between two plain values, as `path: is X, the reference has Y`."""
    if isinstance(source, dict) and isinstance(target, dict):
        found: list[str] = []
        for key in sorted({*source, *target}):
            if key not in target:
                found.append(f"{path}.{key} is missing, the reference has {quoted(source[key])}")
            elif key not in source:
                found.append(f"{path}.{key} is {quoted(target[key])}, the reference has none")
            else:
                found += differences(f"{path}.{key}", source[key], target[key])
        return found
    if isinstance(source, list) and isinstance(target, list) and len(source) == len(target):
        return [
            line
            for i, (a, b) in enumerate(zip(source, target, strict=True))
            for line in differences(f"{path}[{i}]", a, b)
        ]
    return (
        []
        if source == target
        else [f"{path} is {quoted(target)}, the reference has {quoted(source)}"]
    )


def _tensors(item: Item, state: Sampled, part: str, held: str) -> Check:
    if state.missing:
        return _unobserved(item, state)
    source, target = combine(state.source, part), combine(state.target, part)
    if not source and not target:
        return Check(item, Held.HELD, f"the model has no {part}", facts=state.refs)
    fit = _fit(state, part)
    problems = _without_parts(_value_problems(source, target), fit)
    unknown = _incomplete(source, target)
    return _row(item, problems, f"{len(source)} {held}", state.refs, unknown, fit.unknown)


def _fit(state: Sampled, part: str) -> parts.Fit:
    """How what does not simply agree fits together, where ranks hold parts of it."""

    def fitted() -> parts.Fit:
        source, target = combine(state.source, part), combine(state.target, part)
        problems = (*_key_problems(source, target), *_value_problems(source, target))
        asked = {_subject(text) for text in problems} & (source.keys() | target.keys())
        return parts.fit(state.source, state.target, part, asked, state.given)

    if len(state.source) == len(state.target) and not state.on_other_stages:
        return parts.Fit()  # rank by rank: what is another's is wrong
    return state.derived.once(("fit", part, *sorted(state.given.declared)), fitted)


def _without_parts(problems: Sequence[str], fit: parts.Fit) -> list[str]:
    """The problems that no part explains, and those of parts that are wrong."""
    return [*(text for text in problems if _subject(text) not in fit.names), *fit.broken]


def _key_problems(source: Mapping[str, Logical], target: Mapping[str, Logical]) -> list[str]:
    problems = [
        f"{name} is missing after the restore" for name in sorted(set(source) - set(target))
    ]
    problems += [f"{name} is new after the restore" for name in sorted(set(target) - set(source))]
    for name in sorted(set(source) & set(target)):
        before, after = source[name], target[name]
        if before.shape != after.shape:
            problems.append(
                f"{name} has shape {list(after.shape)}, the reference {list(before.shape)}"
            )
        elif before.dtype != after.dtype:
            problems.append(f"{name} has dtype {after.dtype}, the reference {before.dtype}")
    return problems


def _value_problems(source: Mapping[str, Logical], target: Mapping[str, Logical]) -> list[str]:
    problems = []
    for name in sorted(set(source) & set(target)):
        before, after = source[name], target[name]
        if not (before.complete and after.complete):
            continue
        replicas = _replica_problems(before, after)
        if replicas:
            problems += replicas
        elif before.digest != after.digest:
            shown = (
                f" is {after.digest}, the reference has {before.digest}"
                if before.dtype == "value"
                else ""
            )
            problems.append(f"{name}{shown or ' differs from the reference'}")
    return problems


def _incomplete(source: Mapping[str, Logical], target: Mapping[str, Logical]) -> list[str]:
    """Tensors whose recorded parts do not make up the whole: unknown, which is not different."""
    return [
        name
        for name in sorted(set(source) & set(target))
        if not (source[name].complete and target[name].complete)
    ]


def _replica_problems(before: Logical, after: Logical) -> list[str]:
    """State that each rank holds for itself must come back on the rank that held it."""
    if not (before.replicas_differ or after.replicas_differ):
        return []
    held = dict(before.by_rank)
    if not held:
        return [f"{after.name}: ranks hold different values, all ranks of the reference held one"]
    now = dict(after.by_rank) or dict.fromkeys(held, after.digest)
    wrong = [rank for rank in sorted(set(held) & set(now)) if held[rank] != now[rank]]
    return [f"{after.name} on rank {rank} differs from the reference" for rank in wrong]


def _by_rank(state: Sampled, part: str) -> list[tuple[int, JsonValue, JsonValue]]:
    """(rank, source, target) of what every rank holds for itself, each distinct pair once.

    Where the number of ranks changes, every restored rank is held against what all ranks of the
    source shared; where they shared nothing, only rank 0 has a counterpart.
    """
    source, target = ([f.data[part] for f in facts] for facts in (state.source, state.target))
    if len(source) != len(target):
        shared = all(each == source[0] for each in source)
        source = [source[0]] * (len(target) if shared else 1)
    pairs: list[tuple[int, JsonValue, JsonValue]] = []
    for rank, (before, after) in enumerate(zip(source, target, strict=False)):
        if all(before != b or after != a for _, b, a in pairs):
            pairs.append((rank, before, after))
    return pairs


def _groups_by_rank(state: Sampled) -> list[tuple[int, JsonValue, JsonValue]]:
    return _by_rank(state, "groups")


def _names(part: Mapping[str, JsonValue]) -> frozenset[str]:
    return part.layout.names if isinstance(part, Part) else frozenset(part)


def _whole_groups(state: Sampled) -> list[tuple[int, JsonValue, JsonValue]]:
    """The parameter groups of all stages together, members by name: order is a stage's own."""
    source, target = (
        [_united(ranks) for ranks in zip(*(fact.data["groups"] for fact in facts), strict=True)]
        for facts in (state.source, state.target)
    )
    return [(0, source, target)]


def _united(optimizer: Sequence[JsonValue]) -> list[dict[str, JsonValue]]:
    """One optimizer's groups, given as each rank holds them."""
    return [
        {**groups[0], "members": sorted({name for group in groups for name in group["members"]})}
        for groups in zip(*optimizer, strict=False)
    ]


def _differences_by_rank(state: Sampled, part: str, name: str) -> list[str]:

    def lines() -> list[str]:
        return [
            f"{line}{_on(rank)}"
            for rank, source, target in _by_rank(state, part)
            for line in differences(name, source, target)
        ]

    return state.derived.once(("differences", part), lines)


def _on(rank: int) -> str:
    """Where a difference is, if not on the rank that speaks for all."""
    return f" (rank {rank})" if rank else ""


def _groups(optimizers: JsonValue) -> list[dict[str, JsonValue]]:
    return [group for optimizer in optimizers for group in optimizer]


def _group_problems(
    number: int,
    before: Mapping[str, JsonValue],
    after: Mapping[str, JsonValue],
    apart: frozenset[str],
) -> list[str]:
    """`apart` are names that ranks hold parts under: how many there are is the topology's."""
    problems = []
    wanted, found = ([n for n in g["members"] if n not in apart] for g in (before, after))
    if wanted != found:
        moved = sorted(set(wanted) ^ set(found))
        what = (
            f"members differ: {', '.join(moved[:_SHOWN])}"
            if moved
            else "members are in another order"
        )
        problems.append(f"param_groups[{number}] {what}")
    source = {k: v for k, v in before["hyper"].items() if k != "lr"}
    target = {k: v for k, v in after["hyper"].items() if k != "lr"}
    return problems + differences(f"param_groups[{number}]", source, target)


def _row(
    item: Item,
    problems: list[str],
    held: str,
    refs: tuple[str, ...],
    incomplete: Sequence[str] = (),
    in_parts: Sequence[str] = (),
) -> Check:
    """`in_parts` are parts, in words, of which nobody knows how they fit together."""
    if not problems and in_parts:
        more = f" (and {len(in_parts) - 1} more)" if in_parts[1:] else ""
        what = (
            "ranks hold different parts under one name, and how they fit together is not known: "
            f"{in_parts[0]}{more}"
        )
        subjects = tuple(map(_subject, in_parts[:_SHOWN]))
        move = parts.advice(in_parts)
        return Check(item, Held.NOT_OBSERVED, what, subjects, facts=refs, next_move=move)
    if not problems and incomplete:
        what = f"{incomplete[0]} is not wholly recorded"
        subjects = tuple(incomplete[:_SHOWN])
        return Check(item, Held.NOT_OBSERVED, what, subjects, facts=refs)
    if not problems:
        return Check(item, Held.HELD, held, facts=refs)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Check(
        item,
        Held.BROKEN,
        problems[0] + more,
        subjects=tuple(map(_subject, problems[:_SHOWN])),
        details=tuple(problems[:_SHOWN]),
        facts=refs,
        numbers={"differing": len(problems)},
    )


def _subject(problem: str) -> str:
    """The name a problem begins with."""
    return problem.split(" ", 1)[0].rstrip(":")


def _unobserved(item: Item, state: Sampled) -> Check:
    return Check(item, Held.NOT_OBSERVED, state.missing or "not recorded", facts=state.refs)
