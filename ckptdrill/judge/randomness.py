"""Judge the random state of every rank at the first forward, against what the owner declared.

A kind of generator that no rank ever draws from cannot show that it was restored; a job in which
none
is drawn has not exercised the item. Where the world size changes there is no rule that would be
right
for everyone, so without a declared policy the row stays unproven.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptdrill.judge.trajectory import Pair, Trajectory
from ckptdrill.model import Check, Held, Item, Policy, RngPolicy


def random_state(pair: Pair, policy: Policy, *, same_world_size: bool) -> Check:
    """Digest per rank and kind, judged by the declared policy."""
    declared = policy.rng_same_world_size if same_world_size else policy.rng_other_world_size
    source, target = (
        _digests(pair.reference, pair.restore_step),
        _digests(pair.restored, pair.restore_step),
    )
    refs = tuple(
        ref
        for run in (pair.reference, pair.restored)
        for ref in run.record.refs(run.sample("rng", pair.restore_step))
    )
    if declared is None:
        return Check(
            Item.RNG,
            Held.NOT_OBSERVED,
            "the world size changes and the matrix declares nothing about random state",
            facts=refs,
            next_move="declare policy.rng.other_world_size: continued, reseeded or not_guaranteed",
        )
    if declared is RngPolicy.NOT_GUARANTEED:
        return Check(Item.RNG, Held.OUT_OF_SCOPE, "declared not guaranteed", facts=refs)
    for run in (pair.reference, pair.restored):
        silent = run.silent(run.sample("rng", pair.restore_step))
        if silent:
            what = f"rank {silent[0]} of {run.record.launch_id} recorded no random state"
            return Check(Item.RNG, Held.NOT_OBSERVED, what, facts=refs)
    if declared is RngPolicy.RESEEDED:
        return _reseeded(source, target, refs)
    return _continued(pair, source, target, refs)


def _continued(
    pair: Pair,
    source: Mapping[int, Mapping[str, str]],
    target: Mapping[int, Mapping[str, str]],
    refs: tuple[str, ...],
) -> Check:
    drawn = _drawn(pair.reference, pair.restore_step)
    if not drawn:
        return Check(
            Item.RNG,
            Held.NOT_EXERCISED,
            "no generator was drawn from during the compared steps",
            facts=refs,
            next_move="turn on dropout or another random part of the job, or declare "
            "the item out of scope",
        )
    wrong = [
        f"{kind} on rank {rank} differs from the reference"
        for rank, kinds in sorted(target.items())
        for kind in sorted(drawn)
        if rank in source
        and kinds.get(kind) != source[rank].get(kind)
        and not _went_along(kind, source, target, rank)
    ]
    wrong += [
        f"rank {rank} is new and has no state to continue"
        for rank in sorted(set(target) - set(source))
    ]
    if wrong:
        return Check(
            Item.RNG,
            Held.BROKEN,
            wrong[0] + (f" (and {len(wrong) - 1} more)" if wrong[1:] else ""),
            tuple(wrong[:12]),
            tuple(wrong[:12]),
            refs,
        )
    unused = sorted({k for kinds in source.values() for k in kinds} - drawn)
    detail = (f"never drawn, so not part of the training: {', '.join(unused)}",) if unused else ()
    return Check(
        Item.RNG,
        Held.HELD,
        f"{', '.join(sorted(drawn))} continue on {len(target)} ranks",
        details=detail,
        facts=refs,
    )


def _reseeded(
    source: Mapping[int, Mapping[str, str]],
    target: Mapping[int, Mapping[str, str]],
    refs: tuple[str, ...],
) -> Check:
    """Reseeded ranks must not share a stream: equal streams make equal dropout masks."""
    streams = [kinds.get("torch") for kinds in target.values()]
    if len(streams) > 1 and len(set(streams)) == 1:
        held = len({kinds.get("torch") for kinds in source.values()}) == 1
        if not held:
            return Check(
                Item.RNG,
                Held.BROKEN,
                "every rank was reseeded to the same stream, the reference's ranks had their own",
                ("torch",),
                (),
                refs,
            )
    return Check(Item.RNG, Held.HELD, "reseeded, as declared", facts=refs)


def _digests(run: Trajectory, step: int) -> Mapping[int, Mapping[str, str]]:
    return {fact.rank: fact.data["kinds"] for fact in run.sample("rng", step)}


def _went_along(
    kind: str,
    source: Mapping[int, Mapping[str, str]],
    target: Mapping[int, Mapping[str, str]],
    rank: int,
) -> bool:
    """A generator object that another rank holds now, as a layer's does on another pipeline stage:
    it went along with its state.
    """
    if (kind in source[rank]) == (kind in target[rank]):
        return False
    before, now = (
        {kinds[kind] for kinds in ranks.values() if kind in kinds} for ranks in (source, target)
    )
    return bool(now) and before == now


def _drawn(run: Trajectory, step: int) -> set[str]:
    """Kinds whose state moved on some rank between the restored step and a later sample."""
    return run.derived_from("rng", "state").once(("drawn", step), lambda: _moved(run, step))


def _moved(run: Trajectory, step: int) -> set[str]:
    before = _digests(run, step)
    drawn: set[str] = set()
    for later in (s for s in run.sampled_steps() if s > step):
        for rank, kinds in _digests(run, later).items():
            drawn |= {k for k, v in kinds.items() if before.get(rank, {}).get(k) not in (None, v)}
    return drawn
