"""Which completed step a checkpoint holds: the one that its content is of.

A save call tells when a checkpoint was written. A copy that was taken in memory after one step and
written during the next one is of the step before; so where the weights that were saved are those of
another step than the one at which the call began, that step counts.
"""

from __future__ import annotations

from ckptdrill.judge.inventory import contents_at
from ckptdrill.judge.logical import combine
from ckptdrill.judge.trajectory import Trajectory, local_step_of_save, trajectory
from ckptdrill.model import LaunchRecord


def step_held(
    source: LaunchRecord, start_step: int, checkpoint_suffix: str, named: int
) -> int | None:
    """The completed step of the source that the checkpoint under this path is of. None when no
    observed call wrote it. `named` is the step that the matrix calls it by.
    """
    began = local_step_of_save(source, checkpoint_suffix)
    if began is None:
        return None
    run, at = trajectory(source, start_step), start_step + began
    others = sorted({named, at - 1} - {at})
    return run.derived.once(("step held", at, named), lambda: _by_content(run, at, others))


def _by_content(run: Trajectory, at: int, others: list[int]) -> int:
    """`at`, or the one of the others whose weights were written then."""
    written = contents_at(run, at)
    held = {step: _weights(run, step) for step in (at, *others)}
    if not held[at] or not written or held[at] & written:
        return at
    return next((step for step in others if held[step] and held[step] <= written), at)


def _weights(run: Trajectory, step: int) -> frozenset[object]:
    """The content of what has changed among the weights since the run was sampled first."""
    first = next(iter(run.sampled_steps()), step)
    before, now = (combine(run.sample("state", s), "weights") for s in (first, step))
    return frozenset(
        tensor.content
        for name, tensor in now.items()
        if name not in before or before[name].content != tensor.content
    )
