"""A launch's facts, laid out along the training steps so that two launches can be put side by side.

Steps here are *completed steps of the trajectory*, in the job's numbering: a source run that
started from scratch has completed step 0 at its first forward; a run restored from step 8 has
completed step 8 at its first forward, whatever its own counter says. That is what makes a wrong
counter visible.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache, partial

from ckptdrill.model import Derived, Fact, JsonValue, LaunchRecord, place_of
from ckptdrill.placeholders import saved_to

_RANK, _STEP = operator.attrgetter("rank"), operator.attrgetter("step")


class LossForm(StrEnum):
    """How the losses of ranks make one: which of them it is shows where two runs begin alike."""

    MEAN = "the mean of the ranks"
    SUM = "the sum of the ranks"
    BY_ROWS = "the mean of the ranks by their samples"
    LAST = "that of the last rank"


@dataclass(frozen=True, eq=False)
class Trajectory:
    """`offset` is the completed step at which this process began."""

    record: LaunchRecord
    offset: int

    @cached_property
    def derived(self) -> Derived:
        """What was worked out along these steps: a source is asked the same by all its cells."""
        return Derived()

    @cached_property
    def _common(self) -> Derived:
        return self.record.common.derived.once(("from step", self.offset), Derived)

    def derived_from(self, *kinds: str) -> Derived:
        """Where to keep what follows from the facts of these kinds alone: launches that have them
        in common have it together.
        """
        return self._common if self.record.has_in_common(kinds) else self.derived

    @cached_property
    def stepped(self) -> Mapping[int, tuple[Fact, ...]]:
        """Completed step -> the `stepped` facts of all ranks and optimizers that ended it."""
        return self._of_step("stepped")

    @cached_property
    def batches(self) -> Mapping[int, tuple[Fact, ...]]:
        """Step being trained -> its `batch` facts."""
        # The job's own identifiers, where it told them.
        kind = "samples" if self.record.of("samples") else "batch"
        batches, stepped = self.record.of(kind), self.record.of("stepped")
        derived = self.derived_from(kind, "stepped")
        return derived.once("batches", lambda: _by_training(batches, stepped, self.offset))

    @property
    def last_step(self) -> int:
        """The last step that every rank completed: every fact says how far its rank had come."""
        return self.offset + min(self.record.last_steps.values(), default=0)

    def lost(self, facts: Mapping[int, tuple[Fact, ...]], steps: Iterable[int]) -> str | None:
        """The first rank that left nothing in `facts` for one of `steps`, in words."""
        for step in steps:
            key = ("silent", id(facts), step)  # `facts` is of this trajectory and lives as long
            silent = self.derived.once(key, partial(self.silent, facts.get(step, ())))
            if silent:
                return f"rank {silent[0]} of {self.record.launch_id} lacks facts of step {step}"
        return None

    def silent(self, facts: Iterable[Fact]) -> tuple[int, ...]:
        """The ranks of this launch that none of `facts` comes from."""
        told = {fact.rank for fact in facts}
        size = self.record.world_size
        return () if len(told) == size else tuple(sorted(set(range(size)) - told))

    def sample(self, kind: str, step: int, moment: str = "forward") -> tuple[Fact, ...]:
        """The `state`, `rng` or `roots` facts at one completed step; the last one of each rank."""

        def chosen() -> tuple[Fact, ...]:
            there = self._of_step(kind).get(step, ())
            last = {fact.rank: fact for fact in there if _moment(fact) in (moment, None)}
            return tuple(last[rank] for rank in sorted(last))

        return self.derived_from(kind).once(("sample", kind, step, moment), chosen)

    def _of_step(self, kind: str) -> Mapping[int, tuple[Fact, ...]]:
        """Completed step -> the facts of a kind, in file order within a rank."""
        facts = self.record.of(kind)
        return self.derived_from(kind).once(("kind", kind), lambda: _by_step(facts, self.offset))

    def sampled_steps(self) -> tuple[int, ...]:
        """The completed steps at which the state was sampled at the first forward."""
        states = self.record.of("state")
        steps = (f.step + self.offset for f in states if _moment(f) == "forward")
        of_states = self.derived_from("state")
        return of_states.once("sampled steps", lambda: tuple(sorted(set(steps))))

    def learning_rates(self, step: int) -> Mapping[int, tuple[JsonValue, ...]]:
        """Rank -> the LR of every group of every optimizer in the step that completed `step`."""

        def rates() -> Mapping[int, tuple[JsonValue, ...]]:
            found: dict[int, tuple[JsonValue, ...]] = {}
            for fact in self.stepped.get(step, ()):
                found[fact.rank] = (*found.get(fact.rank, ()), *fact.data["lr"])
            return found

        return self.derived_from("stepped").once(("lr", step), rates)

    def loss(
        self, step: int, form: LossForm = LossForm.MEAN, last: int | None = None
    ) -> float | None:
        """The loss of a step from what the ranks passed to backward: by default the mean over ranks
        of the sum over micro-batches, which is what the update of the step followed. Of each rank's
        micro-batches the `last` ones alone, where that is given.

        Micro-batch losses are summed because an accumulating job divides them itself. Ranks without
        a loss (the early stages of a pipeline) do not count.
        """

        def together() -> float | None:
            facts = [f for f in self.stepped.get(step, ()) if f.data["losses"]]
            if not facts:
                return None
            losses = (_numbers(f.data["losses"]) for f in facts)
            sums = [math.fsum([*each][-last:] if last else each) for each in losses]
            return _together(form, sums, [len(self.rows(step).get(f.rank, ())) for f in facts])

        kinds = ("stepped", *(("batch", "samples") if form is LossForm.BY_ROWS else ()))
        return self.derived_from(*kinds).once(("loss", step, form, last), together)

    def rows(self, step: int) -> Mapping[int, tuple[str, ...]]:
        """Rank -> the row hashes it consumed in the step that leads to `step`."""
        found: dict[int, tuple[str, ...]] = {}
        for fact in self._of_samples(step):
            found[fact.rank] = (*found.get(fact.rank, ()), *_rows_of(fact))
        return found

    def row_counts(self, step: int) -> Counter[str]:
        """How often each row was consumed by all ranks in the step that leads to `step`."""
        rows = (_rows_of(fact) for fact in self._of_samples(step))
        return self._of_batches.once(("rows", step), lambda: Counter(itertools.chain(*rows)))

    def rows_after_save(self, step: int) -> Counter[str]:
        """The rows of the step that follows `step` which were consumed after the save that began
        when `step` was completed: all of them, unless it was made between two micro-batches.
        """

        def rows() -> Counter[str]:
            began: dict[int, tuple[int, int]] = {}
            for fact in self.record.of("save_begin"):
                if fact.step + self.offset == step:
                    began[fact.rank] = max(began.get(fact.rank, (0, 0)), place_of(fact))
            facts = (
                f for f in self._of_samples(step + 1) if place_of(f) > began.get(f.rank, (0, 0))
            )
            return Counter(itertools.chain(*map(_rows_of, facts)))

        return self.derived.once(("rows after save", step), rows)

    def shorter(self, step: int) -> Mapping[str, tuple[str, ...]]:
        """Row hash -> the hashes of that row without its last element, and without its last two."""

        def shorter() -> Mapping[str, tuple[str, ...]]:
            facts = self._of_samples(step)
            return {
                row: tuple(less)
                for f in facts
                for row, less in zip(_rows_of(f), f.data.get("shorter", ()), strict=False)
            }

        return self._of_batches.once(("shorter", step), shorter)

    def frozen_counts(self, step: int) -> Counter[str]:
        """How often each row was given to layers that nobody trains, in that step."""

        def counts() -> Counter[str]:
            facts = (f for f in self.batches.get(step, ()) if f.data.get("frozen"))
            return Counter(itertools.chain(*map(_rows_of, facts)))

        return self._of_batches.once(("rows to frozen", step), counts)

    def _of_samples(self, step: int) -> tuple[Fact, ...]:
        """The batches of a step that are made of samples: where any rank was given some, those that
        only got activations are none, and neither is what is given again at every step.
        """

        def chosen() -> tuple[Fact, ...]:
            facts = tuple(f for f in self.batches.get(step, ()) if not f.data.get("frozen"))
            moving = tuple(f for f in facts if (f.rank, f.data.get("called")) not in self._constant)
            facts = moving or facts
            samples = tuple(f for f in facts if f.data["rows"])
            return samples or facts

        return self._of_batches.once(("of samples", step), chosen)

    @property
    def _of_batches(self) -> Derived:
        kind = "samples" if self.record.of("samples") else "batch"
        return self.derived_from(kind, "stepped")

    @property
    def _constant(self) -> frozenset[tuple[int, JsonValue]]:
        """(rank, called module) of the modules that get the same at every step: positions, masks.

        Not where a rank gets nothing else.
        """

        def constant() -> frozenset[tuple[int, JsonValue]]:
            given: dict[tuple[int, JsonValue], dict[int, list[str]]] = {}
            for step, facts in self.batches.items():
                for fact in (f for f in facts if not f.data.get("frozen")):
                    key = (fact.rank, fact.data.get("called"))
                    given.setdefault(key, {}).setdefault(step, []).extend(_rows_of(fact))
            still = {
                key
                for key, by_step in given.items()
                if len(by_step) > 1 and len({tuple(rows) for rows in by_step.values()}) == 1
            }
            moves = {rank for rank, called in given.keys() - still}
            return frozenset(key for key in still if key[0] in moves)

        return self._of_batches.once("constant", constant)

    def refs(self, steps: Iterable[int]) -> tuple[str, ...]:
        """References to the first rank's `stepped` facts of `steps`."""
        return self.record.refs(self.stepped[s][0] for s in steps if s in self.stepped)


@dataclass(frozen=True)
class Pair:
    """The two runs a check lays side by side, over the window after the restore."""

    reference: Trajectory
    restored: Trajectory
    restore_step: int
    window: int

    @cached_property
    def _derived(self) -> Derived:
        return Derived()

    def derived_from(self, *kinds: str) -> Derived:
        """Where to keep what follows from the facts of these kinds of both runs alone: cells have
        it together whose runs have those facts in common.
        """
        runs = (self.reference, self.restored)
        if not all(run.record.has_in_common(kinds) for run in runs):
            return self._derived
        ran = tuple((run.record.common, run.offset) for run in runs)
        return _side_by_side(*ran, self.restore_step, self.window)

    @cached_property
    def compared(self) -> tuple[int, ...]:
        """The completed steps after the restore that both runs reached."""
        last = min(
            self.reference.last_step, self.restored.last_step, self.restore_step + self.window
        )
        return tuple(range(self.restore_step + 1, last + 1))

    @cached_property
    def goes_on_inside(self) -> int:
        """How many samples of the first compared step were consumed before the save, where it was
        made between two micro-batches and the restored run goes on with those that follow.
        """
        if not self.compared:
            return 0
        step = self.restore_step
        whole, rest = self.reference.row_counts(step + 1), self.reference.rows_after_save(step)
        found = self.restored.row_counts(step + 1)
        return whole.total() - rest.total() if rest and rest == found != whole else 0

    def reference_loss(self, step: int, form: LossForm = LossForm.MEAN) -> float | None:
        """The reference's loss of a compared step, over the micro-batches of the restored run."""
        if not self.goes_on_inside or step != self.compared[0]:
            return self.reference.loss(step, form)
        made = max((len(f.data["losses"]) for f in self.restored.stepped.get(step, ())), default=0)
        return self.reference.loss(step, form, made or None)

    @cached_property
    def lost_steps(self) -> str | None:
        """Why the compared steps are not fully recorded, if they are not: a mean over some of the
        ranks is another number, not evidence of another training.
        """
        runs = (self.reference, self.restored)
        return next((lost for r in runs if (lost := r.lost(r.stepped, self.compared))), None)

    @cached_property
    def lost_batches(self) -> str | None:
        """The same for the batches, of which a global step is the sum."""
        runs = (self.reference, self.restored)
        return next((lost for r in runs if (lost := r.lost(r.batches, self.compared))), None)


def local_step_of_save(record: LaunchRecord, checkpoint_suffix: str) -> int | None:
    """Steps the source had completed in its process when it saved the checkpoint under drill.

    None when no observed save call names that path (a writer the observer does not know).
    """
    if not checkpoint_suffix:
        return None
    return record.derived.once(
        ("saved at", checkpoint_suffix),
        lambda: max(local_steps_of_save(record, checkpoint_suffix), default=None),
    )


def begun_saves(record: LaunchRecord) -> frozenset[int]:
    """The steps that had been completed in this process when a save began."""
    steps = (fact.step for fact in record.of("save_begin"))
    return record.derived_from("save_begin").once("begun saves", lambda: frozenset(steps))


def local_steps_of_save(record: LaunchRecord, checkpoint: str) -> tuple[int, ...]:
    """The steps at which that path or one below it was saved, in order; "" is below every path."""
    path = re.compile(saved_to(checkpoint))
    steps = {
        f.step
        for f in record.of("save_begin")
        if not checkpoint or path.search(record.path(f) or "")
    }
    return tuple(sorted(steps))


@lru_cache(maxsize=16)
def trajectory(record: LaunchRecord, offset: int) -> Trajectory:
    """The trajectory of a record, laid out once for all cells that share the launch."""
    # Not kept by the record itself, which it refers to: a circle is freed late, and these are big.
    return Trajectory(record, offset)


@lru_cache(maxsize=16)
def _side_by_side(*_pair: object) -> Derived:
    return Derived()


def _by_step(facts: Iterable[Fact], offset: int) -> Mapping[int, tuple[Fact, ...]]:
    ordered = sorted(sorted(facts, key=_RANK), key=_STEP)
    return {step + offset: tuple(found) for step, found in itertools.groupby(ordered, _STEP)}


def _by_training(
    batches: Iterable[Fact], stepped: Iterable[Fact], offset: int
) -> Mapping[int, tuple[Fact, ...]]:
    """Step being trained -> its batches, rank by rank in file order. That is the step of the
    optimizer that steps next: with several of them, the first to step closes the step, and what the
    others consume after it still belongs there.
    """
    found: dict[int, list[Fact]] = {}
    closes: dict[int, int] = {}  # rank -> the step that is closed next
    for fact in sorted((*batches, *stepped), key=place_of, reverse=True):
        if fact.kind == "stepped":
            closes[fact.rank] = fact.step
        else:
            step = closes.get(fact.rank, fact.step + 1)
            found.setdefault(step + offset, []).append(fact)
    return {step: tuple(reversed(found[step])) for step in sorted(found)}


def _moment(fact: Fact) -> str | None:
    """`backward` stands for the first forward in loops that never call a module."""
    moment = fact.data.get("at")
    return "forward" if moment == "backward" else moment


def _rows_of(fact: Fact) -> Sequence[str]:
    rows: Sequence[str] = fact.data["rows"] or fact.data.get("activations", ())
    return rows


def _together(form: LossForm, sums: Sequence[float], rows: Sequence[int]) -> float:
    """The losses of ranks, and how many samples each had, as one loss."""
    if form is LossForm.SUM:
        return math.fsum(sums)
    if form is LossForm.LAST:
        return sums[-1]
    if form is LossForm.BY_ROWS and any(rows):
        return math.fsum(map(operator.mul, sums, rows)) / math.fsum(rows)
    return math.fsum(sums) / len(sums)


def _numbers(values: Iterable[JsonValue]) -> list[float]:
    return [float(value) for value in values]
