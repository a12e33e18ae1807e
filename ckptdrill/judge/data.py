"""Judge the data order: the same samples at every global step, none missing, none twice.

Samples are identified by the hash of each row the model consumed; a global step is the multiset of
rows over all ranks, and ranks that by design see the same rows (tensor, context parallel) count
once. At another topology a row may look otherwise and be the same sample: padded to the longest of
other neighbours, or cut over context-parallel ranks. So rows are told there, in this order, by
their content; by their content without the padding and what may have been cut at its end; by their
effect, where the first gradients are the same and the rows those of the uninterrupted control. What
the topology alone does to the batches is known from that control: if the restored run consumes what
it consumes, and those are other samples, the checkpoint is innocent and the batch plan to blame.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptdrill.judge.loss import largest_deviation
from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import EPOCH_BOUNDARY, Check, Held, Item, Topology

Placed = tuple[Trajectory, Topology]


def order(
    pair: Pair,
    source: Topology,
    target: Topology,
    control: Trajectory | None = None,
    *,
    epochs_in_scope: bool,
    same_effect: bool = False,
) -> Check:
    """One row: equal, missing, repeated, foreign or re-ordered samples over the compared steps.

    `same_effect`: the first gradients after the restore are the reference's.
    """
    steps = pair.compared
    if not steps:
        return Check(Item.DATA, Held.NOT_OBSERVED, "the restored run completed no step to compare")
    if pair.lost_batches:
        return Check(Item.DATA, Held.NOT_OBSERVED, pair.lost_batches)
    reference = [global_rows(pair.reference, s, source) for s in steps]
    restored = [global_rows(pair.restored, s, target) for s in steps]
    refs = _refs(pair.reference, steps) + _refs(pair.restored, steps)
    numbers = _numbers(steps, reference, restored)
    told_by = _told_by(pair, source, target, control, same_effect=same_effect)
    if told_by is not None:
        check = _held(pair, source, steps, refs, numbers, epochs_in_scope=epochs_in_scope)
        return replace(check, summary=check.summary + told_by) if told_by else check
    if not all(reference) or not all(restored):
        return Check(
            Item.DATA, Held.NOT_OBSERVED, "no batch with a leading dimension was seen", facts=refs
        )
    if control is not None and not identified(pair, control, source, target):
        return Check(
            Item.DATA,
            Held.NOT_OBSERVED,
            "an uninterrupted run at the target shares no sample with the source either: the rows "
            "cannot be told by their content there (random augmentation? another form?)",
            facts=refs,
            next_move="tell the sample ids with ckptdrill's probe, turn the augmentation off for "
            "the drill, or declare the item out of scope",
        )
    seen = sum((global_rows(pair.reference, s, source) for s in _before(pair)), Counter())
    return _broken(steps, reference, restored, seen, refs, numbers)


def _told_by(
    pair: Pair,
    source: Topology,
    target: Topology,
    control: Trajectory | None,
    *,
    same_effect: bool,
) -> str | None:
    """How all samples of the window are known to be the reference's: "" by their content, else in
    words; None where they are not.
    """
    steps = pair.compared
    restored = (pair.restored, target)
    if all(_same_rows((pair.reference, source), restored, s) for s in _whole_steps(pair)):
        return _inside(pair)
    if _same_to_frozen(pair, source, target):
        return ": frozen layers are given them, and make something else of them"
    if control is None:
        return None
    if all(same_samples((pair.reference, source), restored, s) for s in steps):
        return ", but for the padding at their ends"
    several = _on_several_ranks(pair, source, (control, target), same_effect=same_effect)
    if several or not same_effect:
        return several
    if steps[-1] > control.last_step or control.lost(control.batches, steps):
        return None
    if not all(_same_rows((control, target), restored, s) for s in steps):
        return None
    if not identified(pair, control, source, target):
        return (
            ": they have another form at this topology, are those of an uninterrupted run there, "
            "and the first gradients that follow from them are the reference's"
        )
    return None


def _on_several_ranks(
    pair: Pair, source: Topology, there: Placed, *, same_effect: bool
) -> str | None:
    """How it is known that each sample is given to more ranks, or to fewer, and is the reference's;
    None where that is not so. `there` is the uninterrupted run at the target.
    """
    here, restored = (pair.reference, source), (pair.restored, there[1])
    if not all(_multiple(here, restored, step) for step in pair.compared):
        return None
    if same_effect:
        return ", each on several ranks: the first gradients that follow are the reference's"
    first = pair.reference.offset + 1
    as_there = _multiple(here, there, first)
    return ", each on several ranks, as in an uninterrupted run there" if as_there else None


def _whole_steps(pair: Pair) -> Sequence[int]:
    """The compared steps of which both runs consumed all micro-batches."""
    return pair.compared[1:] if pair.goes_on_inside else pair.compared


def _inside(pair: Pair) -> str:
    if not pair.goes_on_inside:
        return ""
    before, step = pair.goes_on_inside, pair.compared[0]
    return f": {before} samples of step {step} were consumed before the save, as pending gradients"


def _same_to_frozen(pair: Pair, source: Topology, target: Topology) -> bool:
    """Whether layers that nobody trains are given the reference's rows at every step. What is given
    to them beside (when the process begins, say) is no sample.
    """
    runs = ((pair.reference, source), (pair.restored, target))
    given = [
        [
            _once_per_copy(run.frozen_counts(step), topology.tp * topology.cp)
            for run, topology in runs
        ]
        for step in pair.compared
    ]
    moves = len({tuple(sorted(wanted)) for wanted, _ in given}) > 1
    return moves and all(wanted and wanted <= found for wanted, found in given)


def _same_rows(one: Placed, other: Placed, step: int) -> bool:
    rows = global_rows(one[0], step, one[1])
    return bool(rows) and _equal(rows, global_rows(other[0], step, other[1]))


def _multiple(one: Placed, other: Placed, step: int) -> bool:
    """Whether every row is there as many times more often, in either direction."""
    rows = [global_rows(run, step, topology) for run, topology in (one, other)]
    few, many = sorted(rows, key=Counter.total)
    factor, rest = divmod(many.total(), few.total() or 1)
    return rest == 0 and _equal(Counter({row: n * factor for row, n in few.items()}), many)


def same_samples(one: Placed, other: Placed, step: int) -> bool:
    """Whether both consumed the same samples in the step that leads to `step`, padded or not."""
    if _same_rows(one, other, step):
        return True
    rows = [global_rows(run, step, topology) for run, topology in (one, other)]
    if rows[0].total() != rows[1].total() or not rows[0]:
        return False
    same = _Same({**one[0].shorter(step), **other[0].shorter(step)})
    return same.counted(rows[0]) == same.counted(rows[1])


class _Same:
    """Rows that are one sample: what is left of one of them without its end is the other, or what
    is left of it. Each has a representative.
    """

    def __init__(self, shorter: Mapping[str, Sequence[str]]) -> None:
        self._parent: dict[str, str] = {}
        for row, cut in shorter.items():
            for less in cut:
                self._parent[self._top(less)] = self._top(row)

    def counted(self, rows: Counter[str]) -> Counter[str]:
        """The rows by their representatives."""
        found: Counter[str] = Counter()
        for row, count in rows.items():
            found[self._top(row)] += count
        return found

    def _top(self, row: str) -> str:
        while (above := self._parent.get(row, row)) != row:
            row = above
        return row


def identified(pair: Pair, control: Trajectory, source: Topology, target: Topology) -> bool:
    """Whether rows of the target can be told by their content: an uninterrupted run there consumes
    as many as the source does, and none that is not the source's, or else other numbers of them.

    Rows that the source has at no step at all are no other samples, as far as is known: it is the
    same data in another form.
    """
    steps = [s for s in pair.compared if s <= control.last_step]
    if not steps:
        return True
    known = _all_rows(pair.reference)
    for step in steps:
        here, there = global_rows(pair.reference, step, source), global_rows(control, step, target)
        foreign = sum(count for row, count in there.items() if row not in known)
        if here.total() == there.total() and 2 * foreign > (there - here).total():
            return False
        other_form = _shapes(pair.reference, step) != _shapes(control, step)
        if not here & there and foreign == there.total() and other_form:
            return False
    return True


def _shapes(run: Trajectory, step: int) -> frozenset[str]:
    """The shapes of the rows of a step: those of slices and of other padding are others."""
    facts = run.batches.get(step, ())
    return frozenset(repr(f.data["shapes"]) for f in facts if f.data["rows"] and "shapes" in f.data)


def _all_rows(run: Trajectory) -> frozenset[str]:
    """The rows that a run consumed at any step."""
    return run.derived.once(
        "all rows", lambda: frozenset(row for step in run.batches for row in run.row_counts(step))
    )


def global_rows(run: Trajectory, step: int, topology: Topology) -> Counter[str]:
    """The multiset of rows of one global step."""
    copies = topology.tp * topology.cp
    rows = run.row_counts(step)
    return run.derived.once(("global rows", step, copies), lambda: _once_per_copy(rows, copies))


def _once_per_copy(total: Counter[str], copies: int) -> Counter[str]:
    if copies > 1 and all(count % copies == 0 for count in total.values()):
        return Counter({row: count // copies for row, count in total.items()})
    return total


def _alike(
    one: Trajectory, its: Topology, other: Trajectory, others: Topology, steps: Sequence[int]
) -> bool:
    return all(_equal(global_rows(one, s, its), global_rows(other, s, others)) for s in steps)


def _equal(one: Counter[str], other: Counter[str]) -> bool:
    """Counted from rows, so without zeros, of which Counter's own comparison thinks in Python."""
    return dict.__eq__(one, other)


def rows_per_rank(run: Trajectory, step: int) -> tuple[int, ...]:
    """How many rows each rank consumed: unequal shares make a mean of means another loss.

    Later pipeline stages consume none.
    """
    return tuple(len(rows) for _, rows in sorted(run.rows(step).items()) if rows)


def same_as_control(
    pair: Pair,
    control: Trajectory,
    source: Topology,
    target: Topology,
    noise: float,
    *,
    same_effect: bool | None = None,
) -> str | None:
    """Why the target topology itself changes the batches, if the uninterrupted control shows it
    does.

    None when the control consumes what the source consumes, or when the restored run consumes
    something else than the control. `same_effect`: whether the first gradients are the same, which
    those of other samples are not; None where that is not known.
    """
    steps = [s for s in pair.compared if s <= control.last_step]
    if not steps or pair.lost_batches or control.lost(control.batches, steps):
        return None
    first = steps[0]
    here, there = global_rows(pair.reference, first, source), global_rows(control, first, target)
    if not _alike(control, target, pair.restored, target, steps):
        # A position that is counted in samples stands elsewhere by then: as many a step are enough.
        restored = global_rows(pair.restored, first, target)
        known = _all_rows(pair.reference) | _all_rows(control)
        if here.total() == there.total() or restored.total() != there.total():
            return None
        if not known >= restored.keys():
            return None
    one, other = (pair.reference, source), (control, target)
    if not all(same_samples(one, other, s) or _multiple(one, other, s) for s in steps):
        if same_effect or not identified(pair, control, source, target):
            return None
        if here.total() != there.total():
            return (
                f"another training by the batch plan: {there.total()} samples a step instead of "
                f"{here.total()} (an uninterrupted run at {target.short} does that, too)"
                f"{_rates(pair, control, first)}"
            )
        return (
            f"{(there - here).total()} of the {there.total()} samples of step {first} are others "
            f"than at {source.short}, in an uninterrupted run at {target.short}, too"
        )
    shares = rows_per_rank(control, first)
    worst = largest_deviation(pair.reference, control, steps)
    if len(set(shares)) > 1 and (worst > noise or same_effect is False):
        return (
            f"the ranks of {target.short} hold {shares} rows of one global batch, so the mean of "
            "their means weighs samples unequally (the loss of an uninterrupted run there is "
            f"{worst:.2g} off)"
        )
    return None


def _rates(pair: Pair, control: Trajectory, step: int) -> str:
    """How the learning rate of the control differs, in words."""
    here, there = (run.learning_rates(step).get(0, ()) for run in (pair.reference, control))
    if len(here) != len(there) or not here or here == there:
        return ""
    return f", rate {there[0]:g} instead of {here[0]:g}"


def _held(
    pair: Pair,
    source: Topology,
    steps: Sequence[int],
    refs: tuple[str, ...],
    numbers: dict[str, object],
    *,
    epochs_in_scope: bool,
) -> Check:
    rows = sum(Counter(r).total() for r in (global_rows(pair.reference, s, source) for s in steps))
    summary = f"{rows} samples over {len(steps)} steps, the same at every step"
    unexercised = _epochs_unexercised(pair, source, steps) if epochs_in_scope else ""
    if not unexercised:
        return Check(Item.DATA, Held.HELD, summary, facts=refs, numbers=numbers)
    return Check(
        Item.DATA,
        Held.NOT_EXERCISED,
        f"{summary}, but {unexercised}",
        facts=refs,
        numbers=numbers,
        next_move="choose a restore_step in the second epoch and a window that reaches the third, "
        f"or declare `{EPOCH_BOUNDARY}` out of scope",
    )


def _epochs_unexercised(pair: Pair, source: Topology, steps: Sequence[int]) -> str:
    """A loader that forgets its epoch is only seen when the save lies beyond the first one.

    Epochs show as samples that come again, or (where augmentation makes every row new) as a counter
    of that name in the job's loop.
    """
    before = _level(pair, source, [*_before(pair), steps[0]])
    after = _level(pair, source, [*_before(pair), *steps])
    first, *window = (_epoch(pair.reference, s) for s in (_first_step(pair), *steps))
    if before < 2 and window[0] == first:
        return "no sample had come again when the checkpoint was saved: that is the first epoch"
    if after == before and window[-1] == window[0]:
        return "the compared steps end before the next epoch begins"
    return ""


def _first_step(pair: Pair) -> int:
    return min(pair.reference.stepped, default=pair.restore_step + 1)


def _epoch(run: Trajectory, step: int) -> int | None:
    """The epoch as the job's own loop counts it in the step that completes `step`."""
    facts = run.stepped.get(step, ())
    counters = facts[0].data.get("counters", {}) if facts else {}
    return next(
        (n for name, n in counters.items() if re.search(r"epoch\]?$", name, re.IGNORECASE)), None
    )


def _level(pair: Pair, topology: Topology, steps: Sequence[int]) -> int:
    """How often the most frequent sample has been consumed."""

    def level() -> int:
        seen: Counter[str] = Counter()
        for step in steps:
            rows = set(global_rows(pair.reference, step, topology))
            seen.update(rows | pair.reference.frozen_counts(step).keys())
        return max(seen.values(), default=0)

    return pair.reference.derived.once(("level", *steps, topology), level)


def _before(pair: Pair) -> list[int]:
    return [s for s in sorted(pair.reference.batches) if s <= pair.restore_step]


def _broken(
    steps: Sequence[int],
    reference: Sequence[Counter[str]],
    restored: Sequence[Counter[str]],
    seen: Counter[str],
    refs: tuple[str, ...],
    numbers: dict[str, object],
) -> Check:
    wanted, got = sum(reference, Counter()), sum(restored, Counter())
    first = next(s for s, a, b in zip(steps, reference, restored, strict=True) if a != b)
    missing, extra = (wanted - got).total(), got - wanted
    again = sum(min(n, seen[row]) for row, n in extra.items())
    foreign = extra.total() - again
    parts = [f"{missing} samples of the window are missing"] if missing else []
    parts += [f"{again} samples already trained are repeated"] if again else []
    parts += [f"{foreign} samples are not those of the reference"] if foreign else []
    parts = parts or ["the same samples come in another order"]
    details = [f"the first step that differs is {first}"]
    if again and restored[0] and all(row in seen for row in restored[0]):
        details.append("the data restarts at samples that were consumed before the checkpoint")
    return Check(
        Item.DATA,
        Held.BROKEN,
        f"from step {first}: {', '.join(parts)}",
        ("data order",),
        tuple(details),
        refs,
        {**numbers, "trained_twice": again, "never_trained": missing},
    )


def _numbers(
    steps: Sequence[int], reference: Sequence[Counter[str]], restored: Sequence[Counter[str]]
) -> dict[str, object]:
    pairs = list(zip(reference, restored, strict=True))
    if all(_equal(a, b) for a, b in pairs):
        none = {name: [0] * len(pairs) for name in ("missing", "repeated", "foreign")}
        totals = {"steps": list(steps), "global_batch": [b.total() for b in restored]}
        return {**totals, **none, "reordered": [False] * len(pairs)}
    wanted, got = sum(reference, Counter()), sum(restored, Counter())
    return {
        "steps": list(steps),
        "global_batch": [b.total() for b in restored],
        "missing": [(a - b).total() for a, b in pairs],
        "repeated": [sum((b - a)[row] for row in (b - a) if row in got - wanted) for a, b in pairs],
        "foreign": [sum(n for row, n in (b - a).items() if row not in wanted) for a, b in pairs],
        "reordered": [a != b and all(row in wanted for row in b) for a, b in pairs],
    }


def _refs(run: Trajectory, steps: Sequence[int]) -> tuple[str, ...]:
    return run.record.refs(run.batches[s][0] for s in steps if s in run.batches)
