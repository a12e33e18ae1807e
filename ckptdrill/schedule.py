"""What may start next: the order of a run and its packing onto a machine. Pure but for `detect`.

Process starts are what a drill costs, so the machine is kept full: of the steps whose dependencies
are met, the one with the longest chain of work behind it starts first, and a smaller one fills what
is left. A step whose dependency failed is skipped with the reason, its siblings go on. Everything
here is a function of what has ended so far, which is why a killed run continues where it was.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptdrill.errors import UserError
from ckptdrill.model import Convert, Launch, Step

# Two launches of two ranks side by side keep two cores busy: starting up is half waiting.
_LEAST_RANKS_AT_ONCE = 4
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Capacity:
    """How many ranks run at once. `devices` are ids for CUDA_VISIBLE_DEVICES, empty on a CPU."""

    ranks: int
    devices: tuple[str, ...] = ()

    @classmethod
    def detect(cls, gpus: Path = _NVIDIA_GPUS) -> Capacity:
        """One rank per visible GPU; without any, one per core and at least four.

        `gpus` is the folder in which the driver keeps one entry per GPU.
        """
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        present = len(list(gpus.iterdir())) if gpus.is_dir() else 0
        if present and visible is None:
            devices = tuple(str(number) for number in range(present))
        elif present:
            devices = tuple(part.strip() for part in str(visible).split(",") if part.strip())
        else:
            devices = ()
        if devices:
            return cls(len(devices), devices)
        return cls(max(_LEAST_RANKS_AT_ONCE, len(os.sched_getaffinity(0))))


@dataclass(frozen=True)
class Graph:
    """The steps of a run by id, and their ids by how much work hangs on each, most first."""

    steps: Mapping[str, Step]
    by_urgency: tuple[str, ...]

    @classmethod
    def of(cls, steps: Mapping[str, Step], turns: Mapping[str, int] | None = None) -> Graph:
        """The graph over `steps`; those with a lower number in `turns` come before all urgency, and
        those that a step plans come in its turn.

        Raises UserError for a step that waits for one that nobody plans, or for itself.
        """
        urgency_s = _urgency_s(steps)
        order = {
            step_id: (_turn(step, turns or {}), -urgency_s[step_id])
            for step_id, step in steps.items()
        }
        return cls(steps, tuple(sorted(steps, key=lambda step_id: order[step_id])))


@dataclass(frozen=True)
class Assignment:
    """A step that may start now, and the devices it gets (none on a CPU)."""

    step_id: str
    devices: tuple[str, ...] = ()


def ranks_of(step: Step) -> int:
    """Ranks a step occupies while it runs: a conversion is one process, changing a copy none."""
    if isinstance(step, Convert):
        return 1
    return step.topology.world_size if isinstance(step, Launch) else 0


def cost_s(step: Step) -> float:
    """Expected seconds of a small launch: start-up, growing with the ranks that share the cores."""
    return 1.0 + 0.25 * ranks_of(step) if ranks_of(step) else 0.1


def next_steps(
    graph: Graph,
    capacity: Capacity,
    *,
    ended: Collection[str],
    running: Mapping[str, tuple[str, ...]],
    held: Collection[str] = (),
) -> tuple[Assignment, ...]:
    """The steps to start now, most urgent first.

    `ended` are the steps that are over, however they went, and `running` maps those in progress to
    their devices; `held` may not start yet for a reason of the caller's. A step larger than the
    machine runs alone, with every device.
    """
    used = sum(ranks_of(graph.steps[step_id]) for step_id in running)
    taken = {device for devices in running.values() for device in devices}
    free = [device for device in capacity.devices if device not in taken]
    chosen = []
    for step_id in graph.by_urgency:
        if step_id in ended or step_id in running or step_id in held:
            continue
        step = graph.steps[step_id]
        ranks = ranks_of(step)
        fits = ranks == 0 or used == 0 or used + ranks <= capacity.ranks
        if fits and all(other in ended for other in step.after):
            devices, free = tuple(free[:ranks]), free[ranks:]
            used += ranks
            chosen.append(Assignment(step_id, devices))
    return tuple(chosen)


def skip_reasons(graph: Graph, lost: Mapping[str, str], settled: Collection[str]) -> dict[str, str]:
    """Why each step that is not `settled` can never run, given why others were `lost`.

    The reason of the first cause is passed on along the chain.
    """
    reasons: dict[str, str] = {}
    for step_id in _dependencies_first(graph.steps):
        if step_id in settled:
            continue
        for other in graph.steps[step_id].after:
            cause = lost.get(other) or reasons.get(other)
            if cause is not None:
                reasons[step_id] = cause if other in reasons else f"{other}: {cause}"
    return reasons


def forecast(graph: Graph, capacity: Capacity) -> dict[str, tuple[float, float, tuple[str, ...]]]:
    """When each step would run if every one took `cost_s`: start, end (seconds), and devices."""
    now, running, ended = 0.0, dict[str, tuple[str, ...]](), set[str]()
    ends: list[tuple[float, str]] = []
    table: dict[str, tuple[float, float, tuple[str, ...]]] = {}
    while len(ended) < len(graph.steps):
        for chosen in next_steps(graph, capacity, ended=ended, running=running):
            end = now + cost_s(graph.steps[chosen.step_id])
            running[chosen.step_id] = chosen.devices
            table[chosen.step_id] = (now, end, chosen.devices)
            heapq.heappush(ends, (end, chosen.step_id))
        now, finished = heapq.heappop(ends)
        del running[finished]
        ended.add(finished)
    return table


def _turn(step: Step, turns: Mapping[str, int]) -> int:
    """The turn of a step; one that was not given any, such as a probe, comes first."""
    planner = step.waits_for if isinstance(step, Launch) else None
    return turns.get(step.id, turns.get(planner or "", 0))


def _urgency_s(steps: Mapping[str, Step]) -> dict[str, float]:
    """Longest chain of expected seconds from the start of each step to the end of the run."""
    urgency = {step_id: cost_s(step) for step_id, step in steps.items()}
    for step_id in reversed(list(_dependencies_first(steps))):
        for other in steps[step_id].after:
            chain = cost_s(steps[other]) + urgency[step_id]
            urgency[other] = max(urgency[other], chain)
    return urgency


def _dependencies_first(steps: Mapping[str, Step]) -> Iterator[str]:
    done: set[str] = set()
    waiting = list(steps)
    while waiting:
        ready = [
            step_id for step_id in waiting if all(other in done for other in steps[step_id].after)
        ]
        if not ready:
            raise _unreachable(steps, waiting)
        yield from ready
        done.update(ready)
        waiting = [step_id for step_id in waiting if step_id not in done]


def _unreachable(steps: Mapping[str, Step], waiting: list[str]) -> UserError:
    for step_id in waiting:
        for other in steps[step_id].after:
            if other not in steps:
                return UserError(
                    f"step {step_id!r} waits for {other!r}, which no plan contains",
                    hint="the drill must plan every step whose checkpoint it uses",
                )
    return UserError(
        f"these steps wait for each other: {', '.join(waiting)}",
        hint="a drill may only restore checkpoints of launches that end before it",
    )
