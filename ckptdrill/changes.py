"""What differs between two runs: verdicts that changed, why, and what ran that was not the same.

Pure. A verdict that changed while nothing else did is said to be so: either the cell is flaky, or
the cause is something that a run does not record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptdrill.history import Outcome, PastRun


@dataclass(frozen=True)
class Change:
    """A cell that came out otherwise; None where a run does not have the cell."""

    cell: str
    before: Outcome | None
    after: Outcome | None


@dataclass(frozen=True)
class Setting:
    """Something that ran in another version, or in one of the two runs only."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Changes:
    """From run A to run B."""

    cells: tuple[Change, ...]
    settings: tuple[Setting, ...]
    same: int  # cells with the same verdict and reason

    @property
    def unexplained(self) -> bool:
        """Whether a verdict changed although nothing that is recorded did."""
        both = [each for each in self.cells if each.before and each.after]
        drilled = [
            e
            for e in both
            if e.before
            and e.after
            and e.before.executed
            and e.after.executed
            and e.before.plan == e.after.plan
        ]
        return bool(drilled) and not self.settings


def between(a: PastRun, b: PastRun) -> Changes:
    """What changed from `a` to `b`; a blame that moved counts, an explanation in other words does
    not.
    """
    before, after = a.by_cell, b.by_cell
    changed = [
        Change(cell, before.get(cell), after.get(cell))
        for cell in sorted({*before, *after})
        if _key(before.get(cell)) != _key(after.get(cell))
    ]
    same = len({*before} & {*after}) - sum(1 for c in changed if c.before and c.after)
    return Changes(tuple(changed), settings(a.settings or {}, b.settings or {}), same)


def _key(outcome: Outcome | None) -> tuple[str | None, ...] | None:
    return None if outcome is None else (*outcome.found, outcome.item, outcome.subject)


def settings(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Setting, ...]:
    """The names whose values differ, in order."""
    return tuple(
        Setting(name, before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    )
