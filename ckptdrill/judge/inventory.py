"""Judge the job's own saved state: what it saves next must be what the reference saves at that
step.

Every leaf the job hands to a save call is an item, whatever it is. The post-restore checkpoint is
the next save of the restored run; leaf by leaf it is compared with the reference's save of the same
step: plain values exactly, floating-point tensors within what the topology alone does to them
(measured by the uninterrupted control). Leaves the source itself does not reproduce (times, paths)
cannot be held against a restore; a leaf that equals the control's belongs to the target topology.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ckptdrill.columns import Part
from ckptdrill.judge.allowed import Allowed
from ckptdrill.judge.logical import Logical, columnar, combine, is_entry, quoted
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.judge.updates import PROJECTIONS
from ckptdrill.model import Check, Fact, Held, Item, JsonValue

# A projection is a float64 sum over many elements: round-off alone moves it by this much.
FLOOR = 1e-5
_PARTS_FLOOR = 1e-3  # of the size of parts together, some steps after the restore
# Copies of the weights are as far from the reference's as the weights are, where numbers are exact
# enough to tell.
_EXACT, _FURTHER, _COPIES_FLOOR = 0.05, 10.0, 1e-3
_COPY_APART = (
    "{} (with {} more) is {:.2g} off and the weights only {:.2g}: an average that moves otherwise "
    "at this topology"
)
_SHOWN = 12
_SHARED = ("save", "async_save")  # the calls of torch.distributed.checkpoint
# When, where and by which process something was saved: part of every checkpoint, of no training.
_BOOKKEEPING = re.compile(
    r"(^|[._:\[])(time(stamp)?|date(time)?|elapsed\w*|duration|hours|minutes|seconds|wall\w*|pid|host"
    r"(name)?|node|user|cwd|path|\w*_(dir|path|time|seconds|hours)|git\w*|version\w*|resume\w*)\]?$",
    re.IGNORECASE,
)
_DATA = re.compile(r"loader|sampler|dataset|(^|[._:])data([._]|$)", re.IGNORECASE)
_RANDOM = re.compile(r"rng|random|generator|seed", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Saved:
    """The leaves of one save, over all ranks and all calls of that step.

    `prefixes` keep apart what different calls save under equal keys: one for each of the facts.
    """

    facts: tuple[Fact, ...]
    prefixes: tuple[str, ...]

    @cached_property
    def leaves(self) -> Mapping[str, tuple[JsonValue, ...]]:
        """Key -> the values ranks gave it, equal ones once, in rank order."""
        return {key: self.values(key) for key in self.keys}

    @cached_property
    def keys(self) -> KeysView[str]:
        """The keys that any rank saved something under."""
        return self._names.keys()

    def values(self, key: str) -> tuple[JsonValue, ...]:
        """One of the `leaves`; empty where nothing has that key."""
        if key not in self._values:
            prefix, name = self._names.get(key, ("", ""))
            distinct: dict[str, JsonValue] = {}
            for fact in self._by_prefix.get(prefix, ()):
                leaves = fact.data["leaves"]
                if name in leaves:
                    distinct.setdefault(repr(value := leaves[name]), value)
            self._values[key] = tuple(distinct.values())
        return self._values[key]

    def whole(self, key: str) -> Logical | None:
        """The tensor that the ranks saved together, where that can be told without its leaves."""
        return self.wholes.get(key)

    @cached_property
    def _values(self) -> dict[str, tuple[JsonValue, ...]]:
        return {}

    @cached_property
    def _names(self) -> Mapping[str, tuple[str, str]]:
        """Key -> the prefix and the name that make it, in the order in which they are met."""
        found: dict[str, tuple[str, str]] = {}
        for prefix, facts in self._by_prefix.items():
            parts = [fact.data["leaves"] for fact in facts]
            # Ranks save the same names mostly; those of one layout are gone through once.
            once = {
                p.layout.tensors + p.layout.others if isinstance(p, Part) else id(p): p
                for p in parts
            }
            for part in once.values():
                for name in part:
                    found.setdefault(prefix + name, (prefix, name))
        return found

    @cached_property
    def wholes(self) -> Mapping[str, Logical]:
        """Every `whole` by its key."""
        return {
            prefix + name: logical
            for prefix, facts in self._by_prefix.items()
            for name, logical in (columnar(facts, "leaves") or {}).items()
            if logical.dtype != "value" and not logical.replicas_differ
        }

    @cached_property
    def _by_prefix(self) -> Mapping[str, list[Fact]]:
        found: dict[str, list[Fact]] = {}
        for fact, prefix in zip(self.facts, self.prefixes, strict=True):
            found.setdefault(prefix, []).append(fact)
        return found


def saved_at(run: Trajectory, step: int) -> Saved:
    """What the run saved when it had completed `step`."""
    of_inventories = run.derived_from("inventory")

    def saves() -> tuple[Fact, ...]:
        facts = run.record.of("inventory")
        return tuple(f for f in facts if f.data["at"] == "save" and f.step + run.offset == step)

    def saved() -> Saved:
        facts = of_inventories.once(("saves", step), saves)
        files = tuple("" if f.data["call"] in _SHARED else _file(run, f) for f in facts)
        return of_inventories.once(("saved", step, files), lambda: Saved(facts, files))

    return run.derived.once(("saved", step), saved)


def contents_at(run: Trajectory, step: int) -> frozenset[object]:
    """What the tensors are that were saved when `step` was completed, as `Logical.content`."""
    saved = saved_at(run, step)
    return frozenset(_content(saved, key) for key in saved.keys) - {None}


def lost_leaves(run: Trajectory, step: int) -> str | None:
    """The first save call of `step` whose leaves were not recorded, in words."""
    return run.derived.once(("lost leaves", step), lambda: _lost_leaves(run, step))


def _lost_leaves(run: Trajectory, step: int) -> str | None:
    record = run.record
    recorded = {(f.rank, record.path(f)) for f in saved_at(run, step).facts}
    for call in record.of("save_begin"):
        begun = call.step + run.offset == step
        if begun and (call.rank, record.path(call)) not in recorded:
            return f"rank {call.rank} of {record.launch_id} saved at step {step} unrecorded"
    return None


def saved_steps(run: Trajectory) -> tuple[int, ...]:
    """Completed steps at which the run saved anything."""
    steps = (f.step + run.offset for f in run.record.of("inventory") if f.data["at"] == "save")
    return run.derived_from("inventory").once("saved steps", lambda: tuple(sorted(set(steps))))


def next_save(
    pair: Pair,
    allowed: Allowed,
    *,
    random_continues: bool,
    data_holds: bool = False,
    rounds: bool = False,
    other_before: frozenset[str] | None = None,
) -> Check:
    """One row over all leaves of the first save after the restore that both runs made.

    `other_before` is None where the updates are the reference's. Else what follows from them is
    another by then: what is named like weights and moments (an average), and every other tensor or
    fraction too, where the script already held something otherwise before the first step. What it
    held then has one of these names. The ceiling of updates is that of what is neither weights nor
    moments. `rounds`: the first updates are the reference's but for rounding, as where a process
    that has just begun adds up in another order; weights and moments then say what those say.
    """
    control, ceiling = allowed.control, allowed.update_ceiling
    reference_steps = [s for s in saved_steps(pair.reference) if s > pair.restore_step]
    restored_steps = [s for s in saved_steps(pair.restored) if s > pair.restore_step]
    common = sorted(set(reference_steps) & set(restored_steps))
    if not common:
        return _no_common_save(pair, reference_steps, restored_steps)
    step = common[0]
    lost = lost_leaves(pair.reference, step) or lost_leaves(pair.restored, step)
    if lost:
        return Check(Item.INVENTORY, Held.NOT_OBSERVED, lost)
    reference, restored = saved_at(pair.reference, step), saved_at(pair.restored, step)
    refs = pair.reference.record.refs(reference.facts) + pair.restored.record.refs(restored.facts)
    others = [saved_at(run, step) for run in allowed.repeats if not lost_leaves(run, step)]
    whole = control is not None and not lost_leaves(control, step)
    beside = saved_at(control, step) if control and whole else None
    ignored = [_BOOKKEEPING]
    ignored += [] if random_continues else [_RANDOM]
    ignored += [_DATA] if data_holds else []  # what the loader does counts, not how it says it
    wanted = rounds or ceiling < math.inf
    state = _of_state(pair.reference, step) if wanted else frozenset()
    asked = _Comparison(
        *(reference, restored, tuple(others), beside, allowed.safety, tuple(ignored)),
        *(ceiling, state, rounds, _digests(pair.reference, step) if control else frozenset()),
        _weights(pair.reference, step) if control else {},
    )
    comparison = _the_same(asked)
    told = [*collapsed(pair), *probed(pair)]
    found = comparison.problems
    causes, follow = _causes(pair, comparison, step, other_before) if found else ([], [])
    own = [*told, *causes]
    problems = [*own, *follow]
    numbers = {"step": step, "leaves": len(reference.keys), "differing": len(problems)}
    if follow and not own:
        numbers["follows"] = True
    if not problems:
        return Check(
            Item.INVENTORY,
            Held.HELD,
            f"{len(comparison.keys)} leaves of the save at step {step} are the reference's",
            facts=refs,
            numbers=numbers,
        )
    more = f" (and {len(problems) - 1} more leaves)" if problems[1:] else ""
    return Check(
        Item.INVENTORY,
        Held.BROKEN,
        f"at the next save (step {step}) {problems[0]}{more}",
        tuple(p.split(" ", 1)[0] for p in problems[:_SHOWN]),
        tuple(problems[:_SHOWN]),
        refs,
        numbers,
    )


def _causes(
    pair: Pair, comparison: _Comparison, step: int, other_before: frozenset[str] | None
) -> tuple[list[str], list[str]]:
    """The problems that may be why the rest differs, those under `other_before` first; and those
    that follow from what went before, as weights and moments do by then.
    """
    of_state, trained = _of_state(pair.reference, step), _trained(pair.reference, step)
    reference, restored = comparison.reference, comparison.restored
    names = other_before or frozenset()

    def before(key: str) -> bool:
        return not names.isdisjoint(re.findall(r"\w+", key))

    def follows(key: str) -> bool:
        if _content(reference, key) in of_state:
            return True
        if other_before is None or before(key):
            return False
        if key.endswith(trained) or not names:
            return key.endswith(trained)
        both = (reference.values(key), restored.values(key))
        return all(v and isinstance(v[0], (dict, float)) for v in both)  # a dict is a tensor

    found = [(key, text, follows(key)) for key, text in comparison.problems]
    causes = [(not before(key), text) for key, text, after in found if not after]
    causes.sort(key=operator.itemgetter(0))
    return [text for _, text in causes], [text for _, text, after in found if after]


def _saved_state(run: Trajectory, step: int) -> tuple[Fact, ...]:
    """The state as a save of this step began; else that of the next forward."""
    return run.sample("state", step, "save") or run.sample("state", step)


def _trained(run: Trajectory, step: int) -> tuple[str, ...]:
    """How keys of weights and moments end: of a tensor of one element they have a number."""
    facts = _saved_state(run, step)
    weights = {name for fact in facts for name in fact.data["weights"]}
    moments = {f".{name.rpartition('.')[2]}" for f in facts for name in f.data["optimizer"]}
    return tuple(weights | moments)


def _weights(run: Trajectory, step: int) -> Mapping[str, object]:
    """The first model's weights at a step: name -> content."""

    def weights() -> Mapping[str, object]:
        held = combine(_saved_state(run, step), "weights")
        return {name: tensor.content for name, tensor in held.items() if ":" not in name}

    return run.derived_from("state").once(("weights saved", step), weights)


def _of_state(run: Trajectory, step: int) -> frozenset[object]:
    """What the weights, buffers and moments of a step are, whatever their names."""
    facts = _saved_state(run, step)
    contents = (
        logical.content
        for part in ("weights", "buffers", "optimizer")
        for logical in combine(facts, part).values()
        if logical.dtype != "value"
    )
    return run.derived_from("state").once(("of state", step), lambda: frozenset(contents))


def _digests(run: Trajectory, step: int) -> frozenset[str]:
    """The digests of all that ranks hold of weights, buffers and moments at a step."""
    facts = _saved_state(run, step)
    held = (
        entry[4]
        for fact in facts
        for part in ("weights", "buffers", "optimizer")
        for entry in fact.data[part].values()
        if is_entry(entry)
    )
    return run.derived_from("state").once(("digests", step), lambda: frozenset(held))


def _content(saved: Saved, key: str) -> object:
    """The content of a saved tensor as `Logical.content` has it; None for anything else."""
    values = saved.values(key)
    digest = _digest(values) if values else None
    return (*digest[:2], "".join(f"{word:016x}" for word in digest[2:])) if digest else None


def collapsed(pair: Pair) -> tuple[str, ...]:
    """Rank-private values that every rank saved under one key, of which one copy came back.

    torch.distributed.checkpoint keeps one copy of a key; torch.save writes a file per rank and
    call.
    """
    return pair.derived_from("inventory").once("collapsed", lambda: _collapsed(pair))


def _collapsed(pair: Pair) -> tuple[str, ...]:
    saves = [
        f for f in saved_at(pair.reference, pair.restore_step).facts if f.data["call"] in _SHARED
    ]
    loads = [f for f in pair.restored.record.of("inventory") if f.data["at"] == "load"]
    saved = {f.rank: f.data["leaves"] for f in saves}
    if len(saved) != pair.restored.record.world_size:
        return ()
    problems = []
    for fact in loads:
        own, leaves = saved.get(fact.rank, {}), fact.data["leaves"]
        for key in _replaced(leaves, own):
            value = leaves[key]
            if value == own[key] or not _own_place(value, own[key]):
                continue
            giver = next((r for r, leaves in saved.items() if leaves.get(key) == value), None)
            if giver is not None:
                problems.append(
                    f"{key} was saved by every rank under one key, and rank {fact.rank} came back "
                    f"with rank {giver}'s"
                )
    return tuple(problems)


def _replaced(leaves: Mapping[str, JsonValue], own: Mapping[str, JsonValue]) -> Iterable[str]:
    """The keys of `leaves` whose value may not be the one that `own` has."""
    if isinstance(leaves, Part) and isinstance(own, Part):
        return leaves.differing(own)
    return [key for key in leaves if key in own]


def probed(pair: Pair) -> tuple[str, ...]:
    """State that the job told through the probe and that differs at the same step of the training.

    Ranks are compared by what they told together, so that another world size is no difference.
    """
    told = [_told(run) for run in (pair.reference, pair.restored)]
    both = sorted(told[0].keys() & told[1].keys())
    return tuple(
        f"{name} told at step {step} differs from the reference's"
        for step, name in both
        if step > pair.restore_step and told[0][step, name] != told[1][step, name]
    )


def _told(run: Trajectory) -> Mapping[tuple[int, str], set[str]]:
    """(completed step, name) -> what the ranks told last at that step."""
    last: dict[tuple[int, str], dict[int, str]] = {}
    for fact in run.record.of("probe"):
        if fact.data["what"] == "state":
            key = (fact.step + run.offset, str(fact.data["name"]))
            last.setdefault(key, {})[fact.rank] = repr(fact.data["leaves"])
    return {key: set(values.values()) for key, values in last.items()}


def unread(pair: Pair) -> tuple[str, ...]:
    """Keys of the restored checkpoint that no load of the restored run asked for (DCP only)."""
    saved = {
        key
        for f in saved_at(pair.reference, pair.restore_step).facts
        if f.data["call"] in _SHARED
        for key in f.data["leaves"]
    }
    loads = [
        f
        for f in pair.restored.record.of("inventory")
        if f.data["at"] == "load" and f.data["call"] == "load"
    ]
    read = {key for f in loads for key in f.data["leaves"]}
    return tuple(sorted(saved - read)) if loads else ()


def _own_place(loaded: JsonValue, saved: JsonValue) -> bool:
    """False for shards of one tensor at different places: those are meant to move between ranks."""
    if _is_tensor(loaded) and _is_tensor(saved):
        return bool(loaded["entry"][2:4] == saved["entry"][2:4])
    return not _is_tensor(loaded) and not _is_tensor(saved)


def _no_common_save(pair: Pair, reference: Sequence[int], restored: Sequence[int]) -> Check:
    if reference and restored:
        return Check(
            Item.INVENTORY,
            Held.BROKEN,
            f"the reference saves after step {reference[0]}, the restored "
            f"run after step {restored[0]} of the same training",
            ("save step",),
        )
    if not saved_steps(pair.reference):
        return Check(
            Item.INVENTORY,
            Held.NOT_OBSERVED,
            "no save call that the observer knows was seen",
            next_move="save through torch.save or torch.distributed.checkpoint, or declare the "
            "item out of scope",
        )
    return Check(
        Item.INVENTORY,
        Held.NOT_EXERCISED,
        "no save follows the restore inside the drill",
        next_move="add a step after restore_step to job.saves: what the job saves next shows state "
        "that nothing else does",
    )


@dataclass(frozen=True)
class _Comparison:
    reference: Saved
    restored: Saved
    repeats: tuple[Saved, ...]
    control: Saved | None
    safety: float
    ignored: tuple[re.Pattern[str], ...]
    ceiling: float = math.inf  # of the band that the control makes, for what is not `of_state`
    of_state: frozenset[object] = frozenset()
    rounds: bool = False
    digests: frozenset[str] = frozenset()  # of what ranks hold of weights and moments
    trained: Mapping[str, object] = field(default_factory=dict, hash=False)  # weights' contents

    @cached_property
    def keys(self) -> set[str]:
        """Keys in question: those of the reference, or at another topology those of its control
        too.
        """
        keys = set(self.reference.keys)
        if self.control is not None and self.control.keys:
            keys &= set(self.control.keys)
        asked = (self.reference, self.repeats, self.ignored)
        of_the_reference = _in_question(*asked)
        return {
            key
            for key in keys | self.restored.keys
            if not _is_path(self.restored, key)
            and (
                key in of_the_reference
                if key in self.reference.keys
                else _is_in_question(key, *asked)
            )
        }

    @cached_property
    def suspects(self) -> list[str]:
        """The keys but those of tensors that are, whole and bit by bit, the reference's."""
        wanted, found = self.reference.wholes, self.restored.wholes
        return sorted(
            key
            for key in self.keys
            if key not in wanted or key not in found or wanted[key].content != found[key].content
        )

    @cached_property
    def problems(self) -> Sequence[tuple[str, str]]:
        """The keys of which something is wrong, each with what it is."""
        found = [(key, text) for key in self.suspects if (text := self.problem(key))]
        return found or self._copies_apart()

    def _copies_apart(self) -> list[tuple[str, str]]:
        """What is laid out like the weights (an average) and is further from the reference's than
        the weights are, though those follow from equal gradients: how it moves is the topology's,
        and an uninterrupted run there is no excuse.
        """
        if self.control is None or self.ceiling > _EXACT:
            return []
        copies = self._copies()
        weights = _far(self.reference, self.restored, copies.get("", {}).values())
        if weights is None:
            return []
        return [
            (first, _COPY_APART.format(first, len(keys) - 1, far, weights))
            for before, keys in copies.items()
            if before
            and (first := min(keys.values()))
            and len(keys) == len(self.trained)
            and (far := _far(self.reference, self.restored, keys.values())) is not None
            and far > max(_FURTHER * weights, _COPIES_FLOOR)
        ]

    def _copies(self) -> Mapping[str, Mapping[str, str]]:
        """What stands before the name of a weight -> the name -> the key; under "" the weights."""
        found: dict[str, dict[str, str]] = {}
        for key in self.keys & self.reference.keys:
            parts = key.replace(":", ".", 1).split(".")
            tails = (".".join(parts[n:]) for n in range(len(parts)))
            name = next((tail for tail in tails if tail in self.trained), None)
            if name is not None:
                is_it = _content(self.reference, key) == self.trained[name]
                before = "" if is_it else key.removesuffix(name)
                found.setdefault(before, {})[name] = key
        return found

    def problem(self, key: str) -> str | None:
        """What is wrong with a leaf, in words that begin with its key; None when it is right."""
        if key not in self.reference.keys or key not in self.restored.keys:
            beside = self.control is not None and key in self.control.keys
            if key in self.restored.keys and not beside:
                return f"{key} is new, the reference does not save it"
            missing = key not in self.restored.keys
            return f"{key} is not saved, the reference saves it" if missing else None
        if self._agree(key):
            return None
        wanted, found = self.reference.values(key), self.restored.values(key)
        if len(wanted) == len(found) == 1 and not _is_tensor(wanted[0]):
            return f"{key} is {quoted(found[0])}, the reference has {quoted(wanted[0])}"
        return f"{key} differs from the reference's"

    def _agree(self, key: str) -> bool:
        if _alike(self.reference, self.restored, key):
            return True
        control = self.control if self.control and key in self.control.keys else None
        if control is not None and _alike(control, self.restored, key):
            return True  # a count or a name that belongs to the topology
        wanted, found = self.reference.values(key), self.restored.values(key)
        if self.control is not None and _in_parts(wanted, found):
            return self._parts_agree(key, wanted, found)
        others = [r.values(key) for r in self.repeats if key in r.keys]
        band = self.safety * max((_distance(wanted, other) for other in others), default=0.0)
        if control is not None:
            by_topology = self.safety * _distance(wanted, control.values(key))
            follows = _content(self.reference, key) in self.of_state
            band = max(band, by_topology if follows else min(by_topology, self.ceiling))
        elif self.rounds and _content(self.reference, key) in self.of_state:
            return True
        elif band == 0.0 and not self.rounds:
            return False  # the source repeats this leaf bit by bit, so must a restore beside it
        distance = _distance(wanted, found)
        return math.isfinite(distance) and distance <= max(band, FLOOR)

    def _parts_agree(
        self, key: str, wanted: tuple[JsonValue, ...], found: tuple[JsonValue, ...]
    ) -> bool:
        """Parts at another topology: those of weights and moments follow from what was stepped
        with; others are as large together as the reference's, within what the control shows.
        """
        if all(value["entry"][4] in self.digests for value in wanted):
            return True
        sizes = _size(wanted), _size(found)
        if sizes[0] is None or sizes[1] is None or not sizes[0]:
            return True
        beside = _size(self.control.values(key)) if self.control else None
        band = abs(beside / sizes[0] - 1.0) * self.safety if beside else 0.0
        return abs(sizes[1] / sizes[0] - 1.0) <= max(min(band, self.ceiling), _PARTS_FLOOR)


@lru_cache(maxsize=16)
def _the_same(comparison: _Comparison) -> _Comparison:
    """The one that was asked for before, with what it has found: saves that are equal are one."""
    return comparison


@lru_cache(maxsize=16)
def _in_question(
    reference: Saved, repeats: tuple[Saved, ...], ignored: tuple[re.Pattern[str], ...]
) -> frozenset[str]:
    """The keys of a reference that are in question: the same for all cells that share it. Not what
    names the process and not the training, what the source itself does not reproduce, and state
    whose item is judged by behaviour.
    """
    return frozenset(k for k in reference.keys if _is_in_question(k, reference, repeats, ignored))


def _is_in_question(
    key: str, reference: Saved, repeats: tuple[Saved, ...], ignored: tuple[re.Pattern[str], ...]
) -> bool:
    if any(pattern.search(key) for pattern in ignored) or _is_path(reference, key):
        return False
    return all(
        _alike(reference, repeat, key) or _floating(reference.values(key))
        for repeat in repeats
        if repeat.keys
    )


def _alike(one: Saved, other: Saved, key: str) -> bool:
    """`_same` of one leaf of two saves; most tensors need no leaf for that."""
    mine, theirs = one.whole(key), other.whole(key)
    if mine is not None and theirs is not None and mine.content == theirs.content:
        return True
    return _same(one.values(key), other.values(key))


def _is_path(saved: Saved, key: str) -> bool:
    return saved.whole(key) is None and any(
        isinstance(value, str) and value.startswith("/") for value in saved.values(key)
    )


def _same(one: tuple[JsonValue, ...], other: tuple[JsonValue, ...]) -> bool:
    """Equal as logical leaves: the same value, or shards that add up to the same digest."""
    if not one or not other:
        return not one and not other
    if {repr(v) for v in one} == {repr(v) for v in other}:
        return True
    digests = [_digest(values) for values in (one, other)]
    return None not in digests and digests[0] == digests[1]


def _digest(values: tuple[JsonValue, ...]) -> tuple[JsonValue, ...] | None:
    entries = [v["entry"] for v in values if _is_tensor(v)]
    if len(entries) != len(values) or not all(is_entry(e) for e in entries):
        return None
    places = {repr((e[2], e[3])): e for e in entries}
    if len(places) != len(entries):
        return None  # replicas that differ: only equal sets of them are the same
    words = [sum(int(e[4][at : at + 16], 16) for e in places.values()) % 2**64 for at in (0, 16)]
    return (entries[0][0], tuple(entries[0][1]), *words)


def _distance(one: tuple[JsonValue, ...], other: tuple[JsonValue, ...]) -> float:
    """Relative distance of two floating-point leaves; infinite where there is no such thing."""
    if _same(one, other):
        return 0.0
    lengths = _lengths(one, other)
    if lengths is None:
        return math.inf
    norm, gap = lengths
    return gap / norm if norm else (0.0 if gap == 0.0 else math.inf)


def _far(one: Saved, other: Saved, keys: Iterable[str]) -> float | None:
    """The relative distance of several tensors together; None where one is not whole, or none."""
    norm = gap = 0.0
    for key in keys:
        values = one.values(key), other.values(key)
        lengths = _lengths(*values)
        if lengths is None or _in_parts(*values):
            return None
        norm, gap = math.hypot(norm, lengths[0]), math.hypot(gap, lengths[1])
    return gap / norm if norm else None


def _lengths(
    one: tuple[JsonValue, ...], other: tuple[JsonValue, ...]
) -> tuple[float, float] | None:
    """How long a floating-point leaf is, and how far the other is from it; None for any other."""
    a, b = _vector(one), _vector(other)
    if a is None or b is None or len(a) != len(b):
        return None
    return math.hypot(*a), math.dist(a, b)


def _vector(values: tuple[JsonValue, ...]) -> list[float] | None:
    if len(values) == 1 and isinstance(values[0], float):
        return [values[0]]
    projections = [v.get("projection") for v in values if _is_tensor(v)]
    if len(projections) != len(values) or not all(projections):
        return None
    return [sum(column) for column in zip(*(p[:PROJECTIONS] for p in projections), strict=True)]


def _in_parts(one: tuple[JsonValue, ...], other: tuple[JsonValue, ...]) -> bool:
    """Whether ranks hold parts of a tensor in plain tensors: other content at the same place, or
    other shapes.
    """
    entries = [v["entry"] for v in (*one, *other) if _is_tensor(v) and is_entry(v["entry"])]
    if len(entries) != len(one) + len(other) or any(any(e[2]) or e[1] != e[3] for e in entries):
        return False
    return len(one) > 1 or len(other) > 1 or len({repr(e[1]) for e in entries}) > 1


def _size(values: tuple[JsonValue, ...]) -> float | None:
    """The size of distinct parts together; None where it is not told."""
    numbers = [v.get("projection", ()) for v in values]
    if not numbers or any(len(each) <= PROJECTIONS for each in numbers):
        return None
    return math.sqrt(math.fsum(each[PROJECTIONS] for each in numbers))


def _floating(values: tuple[JsonValue, ...]) -> bool:
    return bool(values) and _vector(values) is not None


def _is_tensor(value: JsonValue) -> bool:
    return isinstance(value, dict) and "entry" in value


def _file(run: Trajectory, fact: Fact) -> str:
    """torch.save writes one file a call: its name, without the step, keeps equal keys apart."""
    name = (run.record.path(fact) or "").rsplit("/", 1)[-1]
    return re.sub(r"\d+", "N", name) + ":" if name else ""
