"""What the judge is given for one cell: the plan, the declarations, and the facts of its launches.

Nothing else enters a verdict: no clock, no file, no environment. Judging a stored run again, by a
newer ckptdrill, therefore needs the run folder and nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptdrill.model import JsonValue, Launch, LaunchRecord, Plan, Policy, Tolerance


@dataclass(frozen=True)
class Evidence:
    """The facts of one cell.

    `records` maps launch ids to what they left; `skipped` maps step ids that never ran to why;
    `damage` is the record of the damage step. `checkpoint_suffix` is the part of the checkpoint
    template below `{out}`, filled with the restored step (`step-8`); steps are the job's own.
    `checkpoint_root` is that part where it does not name the step, so that what is restored is the
    newest that the source saved; None where another step than `restore_step` may be restored.
    `tiers` maps launch ids to what they found of a memory tier.
    `resume_only` are the arguments that only a resumed run is given, without those that name the
    checkpoint.
    """

    plan: Plan
    policy: Policy
    tolerance: Tolerance
    records: Mapping[str, LaunchRecord]
    restore_step: int
    start_step: int
    window: int
    saves: tuple[int, ...]
    checkpoint_suffix: str
    checkpoint_root: str | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    damage: Mapping[str, JsonValue] | None = None
    resume_only: tuple[str, ...] = ()
    exclusions: tuple[str, ...] = ()  # why documents rule out a cell that nobody drills
    tier_saves: tuple[int, ...] = ()  # steps saved in the memory tier
    tiers: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict)
    conversion: Mapping[str, JsonValue] | None = None  # its record, where what is restored has one
    # Restores at the source's and the target's topology without random layers, where noise hides
    # whether the gradients are the same.
    quiet: tuple[Launch, ...] = ()
    control_failed: str | None = (
        None  # why the baseline of this source does not hold, if it does not
    )

    def record(self, launch_id: str) -> LaunchRecord | None:
        """The record of a launch that ran and ended."""
        record = self.records.get(launch_id)
        return record if record is not None and record.ended is not None else None
