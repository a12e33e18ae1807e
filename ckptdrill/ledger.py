"""What a failure costs: steps to train again, hours to wait, GPU-hours that train nothing. Pure.

First the inputs, each measured or given: GPUs, the step of the last durable commit and of the
failure, seconds per step, hours of restore. Then the sums, tier by tier, since memory and durable
storage hold different steps and give them back at different speeds. GPU-hours of a restore are
*occupied*, not productive: they are never added to those of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptdrill.errors import UserError
from ckptdrill.model import JsonValue

PHASES = ("read", "deserialize", "reshard", "initialize", "validate")


@dataclass(frozen=True)
class Tier:
    """One place to recover from.

    `committed_step` is the last step whose commit there was complete, `restore_h` the wall hours
    from the start of the processes to the first batch.
    """

    name: str
    committed_step: int
    restore_h: float


@dataclass(frozen=True)
class Entry:
    """The bill of one failure, recovered from one tier. Times in the unit of their name."""

    tier: str
    gpus: int
    lost_steps: int
    replay_s: float
    restore_h: float

    @property
    def replay_h(self) -> float:
        """Wall hours to come back to where the failure was."""
        return self.replay_s / 3600

    @property
    def recovery_point_s(self) -> float:
        """How much training is lost, in seconds of training: what a recovery point bounds."""
        return self.replay_s

    @property
    def recovery_time_h(self) -> float:
        """From the start of the restore until the failed step is reached again."""
        return self.restore_h + self.replay_h

    @property
    def restore_gpu_h(self) -> float:
        """GPU-hours occupied by the restore."""
        return self.gpus * self.restore_h

    @property
    def replay_gpu_h(self) -> float:
        """GPU-hours occupied by training the lost steps again."""
        return self.gpus * self.replay_h

    @property
    def gpu_h(self) -> float:
        """Both together."""
        return self.restore_gpu_h + self.replay_gpu_h

    def as_json(self) -> Mapping[str, JsonValue]:
        """Every figure, unrounded."""
        return {
            "tier": self.tier,
            "gpus": self.gpus,
            "lost_steps": self.lost_steps,
            "replay_s": self.replay_s,
            "replay_h": self.replay_h,
            "restore_h": self.restore_h,
            "recovery_point_s": self.recovery_point_s,
            "recovery_time_h": self.recovery_time_h,
            "restore_gpu_h": self.restore_gpu_h,
            "replay_gpu_h": self.replay_gpu_h,
            "gpu_h": self.gpu_h,
        }


def entry(tier: Tier, gpus: int, failed_step: int, step_s: float) -> Entry:
    """The bill when training fails at `failed_step` and goes on from `tier`.

    Raises UserError for figures that no run can have.
    """
    lost_steps = failed_step - tier.committed_step
    if lost_steps < 0:
        raise UserError(
            f"the failure at step {failed_step} lies before the commit at {tier.committed_step}",
            where=f"the {tier.name} tier",
            hint="the committed step is the newest one that was complete when training failed",
        )
    _refuse_impossible({"--gpus": gpus}, above=0)
    _refuse_impossible({"--step-s": step_s, "the restore hours": tier.restore_h}, above=-1)
    return Entry(tier.name, gpus, lost_steps, lost_steps * step_s, tier.restore_h)


def _refuse_impossible(values: Mapping[str, float], *, above: int) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or (value <= 0 if above == 0 else value < 0):
            least = "greater than 0" if above == 0 else "0 or greater"
            raise UserError(f"{name} is {value:g}", hint=f"give a number that is {least}")


# --------------------------------------------------------------------------------------------------
# What a packet measured


@dataclass(frozen=True)
class Restored:
    """The measured restore of one cell, out of packet.json.

    `phases_s` has only what was measured; a phase in `merged` is part of `read`. `step_s` is None
    where no plain step was timed at that topology. `tiers` maps `memory` and `after_loss` to their
    recovery point (`step`, `steps_lost`) and time (`recovery_s`), where a drill measured them.
    """

    cell: str
    planned: bool
    ranks: int
    phases_s: Mapping[str, float]
    merged: tuple[str, ...]
    step_s: float | None
    tiers: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def restore_s(self) -> float:
        """Wall seconds of the restore, conversion included, without `validate`: a job in production
        pays none of that.
        """
        return sum(value for name, value in self.phases_s.items() if name != "validate")

    def phase(self, name: str) -> str:
        """What to show for one of the phases: seconds, `in read`, or `not measured`."""
        if name in self.phases_s:
            return f"{self.phases_s[name]:.3g} s"
        if name in self.merged:
            return "in read"
        return "not measured" if name in PHASES else "none"


def restores(packet: Mapping[str, JsonValue]) -> tuple[Restored, ...]:
    """Every cell of a packet that was restored, as far as it was timed. Raises UserError when the
    packet has another shape.
    """
    try:
        return tuple(_restored(cell) for cell in packet["cells"] if cell["restore"] is not None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            "packet.json has another shape than this version writes",
            hint="`ckptdrill judge RUN` derives it again from the stored facts",
        ) from error


def _restored(cell: Mapping[str, JsonValue]) -> Restored:
    restore = cell["restore"]
    step_s = restore.get("step_s")
    return Restored(
        cell=str(cell["id"]),
        planned=cell["planned_path"] is True,
        ranks=int(cell["address"]["target"]["world_size"]) if cell["address"] else 0,
        phases_s={str(name): float(value) for name, value in restore["phases_s"].items()},
        merged=tuple(map(str, restore["merged"])),
        step_s=None if step_s is None else float(step_s),
        tiers=restore.get("tiers") or {},
    )


def slowest(found: Iterable[Restored]) -> Restored | None:
    """The timed restore that a plan has to reckon with: on the planned path if any is there."""
    timed = [each for each in found if each.phases_s]
    planned = [each for each in timed if each.planned]
    return max(planned or timed, key=lambda each: each.restore_s, default=None)


# --------------------------------------------------------------------------------------------------
# From what is given and what was measured to bills


@dataclass(frozen=True)
class Failure:
    """What is said of a failure; None where nothing is. A tier: (committed step, restore hours)."""

    gpus: int | None
    failed_step: int | None
    step_s: float | None
    durable: tuple[int | None, float | None]
    memory: tuple[int | None, float | None]


def bills(failure: Failure, measured_cell: Restored | None, *, optional: bool) -> list[Entry]:
    """One bill per tier that was named. What a run measured stands in for what was not given.

    `optional`: a failure need not be described at all. Raises UserError when a figure is missing.
    """
    step, (committed, restore_h) = failure.failed_step, failure.durable
    if optional and step is None and committed is None:
        return []
    gpus, step_s = failure.gpus, failure.step_s
    if measured_cell is not None:
        gpus = gpus or measured_cell.ranks
        step_s = measured_cell.step_s if step_s is None else step_s
        restore_h = measured_cell.restore_s / 3600 if restore_h is None else restore_h
    known = {
        "--gpus": gpus,
        "--committed-step": committed,
        "--failed-step": step,
        "--step-s": step_s,
        "--restore-h": restore_h,
    }
    missing = [name for name, value in known.items() if value is None]
    if gpus is None or committed is None or step is None or step_s is None or restore_h is None:
        raise UserError(
            f"the ledger needs {', '.join(missing)}",
            hint="give them, or name a run that measured seconds per step and the restore",
        )
    tiers = [Tier("durable", committed, restore_h)]
    memory_step, memory_h = failure.memory
    if memory_step is not None and memory_h is not None:
        tiers.insert(0, Tier("memory", memory_step, memory_h))
    elif memory_step is not None or memory_h is not None:
        raise UserError("the memory tier needs both --memory-committed-step and --memory-restore-h")
    return [entry(tier, gpus, step, step_s) for tier in tiers]
