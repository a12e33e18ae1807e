"""Histories of one cell for the judge, and one-line edits of them, so that a test reads as a
sentence.

`healthy("fsdp2", "ddp1").without("rng").verdict()` is a source run, its repeat, the control at the
target, the same-topology restore and the drilled restore, all as they should be, except that the
drilled restore recorded no random state. Every edit returns a new history.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

from msgspec import structs

from ckptdrill.judge import table
from ckptdrill.judge.evidence import Evidence
from ckptdrill.model import (
    Cell,
    Check,
    Claim,
    Damage,
    DamageKind,
    Fact,
    Item,
    Launch,
    LaunchRecord,
    Plan,
    Policy,
    RngPolicy,
    Tolerance,
    Verdict,
)
from ckptdrill.plan import SharedLaunches
from tests.judge.training import Layout, Training, lr, topology

SAVES, RESTORE_STEP, WINDOW = (4, 8, 12), 8, 5
END_STEP = RESTORE_STEP + WINDOW
FIRST_STEPS = 3  # whose gradients are recorded, from the start and after each save
SAMPLED = {0, *SAVES, *(s + 1 for s in SAVES), *range(RESTORE_STEP, END_STEP + 1)}
SAMPLED_BY_RESTORES = {*SAVES, *(s + 1 for s in SAVES), END_STEP}
DECLARED = Policy(rng_other_world_size=RngPolicy.NOT_GUARANTEED)
ENDED_WELL = {"launcher": "torchrun", "returncode": 0, "signal": None, "timed_out": False}
Edit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class History:
    """The evidence of one cell, and edits of it. Launches go by their part in the plan: `source`,
    `repeat`, `control`, `baseline`, `restore`.
    """

    evidence: Evidence

    # ------------------------------------------------------------ judging

    def verdict(self) -> Verdict:
        return table.judge(self.evidence)

    def check(self, item: Item) -> Check:
        """The row of one item."""
        return next(check for check in self.verdict().checks if check.item is item)

    # ------------------------------------------------------------ what there is

    def id(self, launch: str) -> str:
        plan = self.evidence.plan
        if launch == "repeat":
            return plan.repeats[0].id
        found = getattr(plan, launch)
        assert isinstance(found, Launch)
        return found.id

    def record(self, launch: str) -> LaunchRecord:
        return self.evidence.records[self.id(launch)]

    # ------------------------------------------------------------ edits

    def given(self, **evidence: Any) -> Self:
        """Other evidence: `policy=`, `tolerance=`, `damage=`, `skipped=` …"""
        return dataclasses.replace(self, evidence=dataclasses.replace(self.evidence, **evidence))

    def with_facts(self, launch: str, facts: Iterable[Fact]) -> Self:
        record = telling(self.record(launch), facts)
        return self.given(records={**self.evidence.records, self.id(launch): record})

    def edited(
        self,
        kind: str,
        edit: Edit,
        *,
        launch: str = "restore",
        rank: int | None = None,
        step: int | None = None,
        from_step: int = 0,
        at: str | None = None,
    ) -> Self:
        """Change the data of the facts of one kind; steps are local to the launch."""
        return self.with_facts(
            launch,
            [
                _changed(f, edit)
                if f.kind == kind
                and rank in (None, f.rank)
                and step in (None, f.step)
                and f.step >= from_step
                and at in (None, f.data.get("at"))
                else f
                for f in self.record(launch).facts
            ],
        )

    def without(
        self,
        *kinds: str,
        launch: str = "restore",
        rank: int | None = None,
        step: int | None = None,
        from_step: int = 0,
    ) -> Self:
        """Lose facts: of these kinds (all, if none is named), of one rank or all."""
        return self.with_facts(
            launch,
            [
                f
                for f in self.record(launch).facts
                if not (
                    (not kinds or f.kind in kinds)
                    and rank in (None, f.rank)
                    and step in (None, f.step)
                    and f.step >= from_step
                )
            ],
        )

    def without_ref(self, ref: str) -> Self:
        """Lose the one fact that a verdict cites."""
        records = {
            name: telling(r, (f for f in r.facts if r.ref(f) != ref))
            for name, r in self.evidence.records.items()
        }
        return self.given(records=records)

    def adding(self, *facts: Fact, launch: str = "restore") -> Self:
        return self.with_facts(launch, (*self.record(launch).facts, *facts))

    def ended(self, launch: str = "restore", **changes: Any) -> Self:
        """Another exit record; `ended(never=True)` for a launch that left none."""
        record = self.record(launch)
        end = None if changes.pop("never", False) else {**ENDED_WELL, **changes}
        record = dataclasses.replace(record, ended=end)
        return self.given(records={**self.evidence.records, self.id(launch): record})

    def cut(self, launch: str = "restore", *, after: int) -> Self:
        """The launch recorded nothing beyond `after` completed steps, and no end of its own."""
        return self.without(launch=launch, from_step=after + 1).without("stopped", launch=launch)

    # ------------------------------------------------------------ what goes wrong with state

    def state(self, edit: Edit, *, launch: str = "restore", rank: int | None = None) -> Self:
        """Change the state that is compared: of the restore before its first step, or of another
        run at the same place.
        """
        step = RESTORE_STEP if launch != "restore" else 0
        return self.edited("state", edit, launch=launch, rank=rank, step=step, at="forward")

    def differs(self, part: str, name: str, *, rank: int = 0) -> Self:
        """One tensor came back with other content on one rank."""
        return self.state(lambda s: s[part].update({name: other(s[part][name])}), rank=rank)

    def loses(self, part: str, *names: str, rank: int | None = None) -> Self:
        """Entries did not come back: those named, or all of the part."""

        def lose(state: dict[str, Any]) -> None:
            for name in names or tuple(state[part]):
                state[part].pop(name, None)
                state["projections"].pop(name, None)

        return self.state(lose, rank=rank)

    def refused(self, *ranks: int, error: Any = None, t: float = 10.0, crash: bool = True) -> Self:
        """These ranks refused to load, the first named first; the launch ends with exit code 1."""
        base = self.without("load_end", "stopped").without("batch", "stepped", "state", "rng")
        links = error or [{"type": "builtins.ValueError", "message": "shapes do not match"}]
        facts = []
        for n, rank in enumerate(ranks):
            when = t + n
            load = {"during": "load", "call": "load", "path": "/x/step-8", "error": links}
            facts.append(self.fact("refused", rank, when, **load))
            if crash:
                facts.append(self.fact("crashed", rank, when + 0.1, during="load", error=links))
                facts.append(self.fact("exited", rank, when + 0.2, code=1))
        return base.adding(*facts).ended(returncode=1)

    def fact(
        self,
        kind: str,
        rank: int = 0,
        t: float = 10.0,
        step: int = 0,
        **data: Any,
    ) -> Fact:
        """A further fact of a launch."""
        return Fact(kind, rank, step, {"t": t, **data}, 9000 + int(10 * t))


def healthy(
    source: str = "fsdp2",
    target: str | None = None,
    *,
    job: Training | None = None,
    control: Training | None = None,
    policy: Policy = DECLARED,
    tolerance: Tolerance | None = None,
    damage: DamageKind | None = None,
) -> History:
    """Everything as it should be; `control` says what the target topology itself changes."""
    plan = plan_of(source, target or source, damage)
    job = job or Training()
    there = control or job
    records = {plan.source.id: run(plan.source, job)}
    for launch in plan.repeats:
        records[launch.id] = run(launch, job)
    if plan.control is not None:
        records[plan.control.id] = run(plan.control, there)
    records[plan.baseline.id] = run(plan.baseline, job, at=RESTORE_STEP)
    records[plan.restore.id] = run(plan.restore, there, at=RESTORE_STEP)
    return History(
        Evidence(
            plan=plan,
            policy=policy,
            tolerance=tolerance or Tolerance(),
            records=records,
            restore_step=RESTORE_STEP,
            start_step=0,
            window=WINDOW,
            saves=SAVES,
            checkpoint_suffix=f"step-{RESTORE_STEP}",
            damage=damage_record(plan.damage) if plan.damage else None,
        )
    )


def damaged(
    kind: DamageKind = DamageKind.BIT_FLIP, source: str = "fsdp2", *, back_to: int | None = None
) -> History:
    """A damage that fired; the restore trains on as if nothing had happened, or `back_to` a step.

    Falling back costs steps, so the reference runs on long enough for the window either way.
    """
    history = healthy(source, damage=kind)
    if back_to is None:
        return history
    facts = run(history.evidence.plan.restore, Training(), at=back_to).facts
    return history.with_facts("restore", facts)


def plan_of(source: str, target: str, damage: DamageKind | None = None) -> Plan:
    """The plan that a drill would make of this cell."""
    cell = Cell("cell", topology(source), "default", topology(target), "default", "made-up")
    shared = SharedLaunches(restore_step=RESTORE_STEP, saves=SAVES, end_step=END_STEP, repeats=1)
    if damage is None:
        return shared.continues(cell)
    step = Damage("damage.cell", damage, shared.checkpoint_of(cell))
    return shared.continues(cell, damage=step, claim=Claim.DETECTS_DAMAGE)


def damage_record(damage: Damage, **changes: Any) -> dict[str, Any]:
    """What the damage step leaves on disk."""
    record = {"id": damage.id, "kind": damage.kind.value, "file": "__0_0.distcp", "fired": True}
    return {**record, "tensor": "embed.weight", **changes}


@cache
def run(launch: Launch, job: Training, at: int = 0) -> LaunchRecord:
    """All facts of a launch that begins with `at` completed steps and ends as planned."""
    size = launch.topology.world_size
    facts: list[Fact] = []
    for rank in range(size):
        lines = _lines(launch, job, at, Layout(launch.topology, rank))
        facts += [
            Fact(kind, rank, step, {"t": float(n) / 100, **data}, n)
            for n, (kind, step, data) in enumerate(lines, 1)
        ]
    return LaunchRecord.made_of(launch.id, facts, ENDED_WELL, size)


def telling(record: LaunchRecord, facts: Iterable[Fact]) -> LaunchRecord:
    """The record of a launch that ended like this one and recorded these facts."""
    return LaunchRecord.made_of(record.launch_id, facts, record.ended, record.world_size)


def other(value: Any) -> Any:
    """Another content in the same place."""
    if isinstance(value, list) and len(value) == 5:
        return [*value[:4], f"{int(value[4], 16) ^ 1:032x}"]
    return value + 1


Line = tuple[str, int, Mapping[str, Any]]


def _lines(launch: Launch, job: Training, at: int, layout: Layout) -> Iterator[Line]:
    """(kind, local step, data) in the order in which the observer writes them."""
    yield "started", 0, _started(layout)
    yield "process_group", 0, {"backend": "gloo", "world_size": layout.topology.world_size}
    if launch.restores is not None:
        path = f"/run/work/{launch.id}/restore/step-{launch.restores.step}"
        yield "load_begin", 0, {"call": "load", "path": path}
        yield "load_end", 0, {"call": "load", "path": path, "took_s": 0.25}
        leaves = job.leaves(at, layout)
        yield "inventory", 0, {"at": "load", "call": "load", "path": path, "leaves": leaves}
    sampled = SAMPLED if launch.restores is None else SAMPLED_BY_RESTORES | {at, at + 1}
    for step in range(at, launch.stop_step + 1):
        local = step - at
        if step in SAVES and step > at:
            yield from _sample(job, step, local, layout, "save")
            path = f"/run/work/{launch.id}/out/step-{step}"
            yield "save_begin", local, {"call": "save", "path": path}
            leaves = job.leaves(step, layout)
            yield "inventory", local, {"at": "save", "call": "save", "path": path, "leaves": leaves}
            yield "save_end", local, {"call": "save", "path": path, "took_s": 0.1}
        if step in sampled or local == 0:
            yield from _sample(job, step, local, layout, "forward")
        if step == launch.stop_step:
            break
        yield "batch", local, {"micro": 0, "rows": job.rows(step + 1, layout)}
        if local < FIRST_STEPS or any(0 <= step - save < FIRST_STEPS for save in SAVES):
            yield "gradient", local, _gradient(job, step + 1, local + 1, layout)
        yield "stepped", local + 1, _stepped(job, step + 1, local + 1, layout)
    yield "stopped", launch.stop_step - at, {"agreed": True}


def _started(layout: Layout) -> dict[str, Any]:
    return {
        "pid": 100 + layout.rank,
        "world_size": layout.topology.world_size,
        "python": "3.11.7",
        "torch": "2.13.0",
        "cuda": None,
        "arguments": [],
        "program_sha256": "c8d9",
    }


def _sample(job: Training, step: int, local: int, layout: Layout, moment: str) -> Iterator[Line]:
    yield "roots", local, {"frozen": [], "tied": [], "non_persistent": ["positions"]}
    yield "state", local, {"at": moment, **job.state(step, layout), "took_s": 0.01}
    yield "rng", local, {"at": moment, "kinds": job.rng(step, layout)}


def _gradient(job: Training, step: int, local: int, layout: Layout) -> dict[str, Any]:
    return {
        "of": local,
        "optimizer": 0,
        "leaves": job.gradients(step, layout),
        "dtypes": ["float32"],
        "matmul": "highest",
        "drawn": False,
    }


def _stepped(job: Training, step: int, local: int, layout: Layout) -> dict[str, Any]:
    return {
        "optimizer": 0,
        "lr": [lr(step)],
        "losses": job.losses(step, layout),
        "micro_batches": 1,
        "counters": job.counters(step, local),
    }


def _changed(fact: Fact, edit: Edit) -> Fact:
    data = copy.deepcopy(dict(fact.data))
    edit(data)
    return structs.replace(fact, data=data)
