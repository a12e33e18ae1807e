"""Builders of stored cells and of whole run folders, so that each test reads as its own case."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import store
from ckptdrill.model import (
    Cell,
    Check,
    Checkpoint,
    Claim,
    Damage,
    DamageKind,
    Expectation,
    Held,
    Item,
    Launch,
    Plan,
    Reason,
    Role,
    Topology,
    Verdict,
    VerdictWord,
    to_json,
)
from ckptdrill.packet import StoredCell
from ckptdrill.store import RunFolder

STEPS = list(range(9, 18))


def topology(degree: int) -> Topology:
    return Topology(name=f"fsdp{degree}", dp_shard=degree)


def launch(launch_id: str, role: Role, degree: int, restores: Checkpoint | None = None) -> Launch:
    return Launch(launch_id, role, topology(degree), "default", stop_step=17, restores=restores)


def make_plan(
    cell_id: str,
    *,
    source: int = 4,
    target: int = 2,
    drill: str = "dp-shrink",
    expect: Expectation | None = None,
    damaged: bool = False,
) -> Plan:
    cell = Cell(
        cell_id, topology(source), "default", topology(target), "default", drill, {}, expect, True
    )
    saved = Checkpoint(f"source-fsdp{source}", 8)
    damage = Damage(f"flip-{cell_id}", DamageKind.BIT_FLIP, saved) if damaged else None
    drilled = Checkpoint(saved.launch_id, 8, damage.id) if damage else saved
    return Plan(
        cell=cell,
        claim=Claim.DETECTS_DAMAGE if damaged else Claim.CONTINUES,
        source=launch(saved.launch_id, Role.SOURCE, source),
        repeats=(launch(f"repeat-fsdp{source}", Role.REPEAT, source),),
        baseline=launch(f"restore-baseline-fsdp{source}", Role.RESTORE, source, saved),
        restore=launch(f"restore-{cell_id}", Role.RESTORE, target, drilled),
        control=launch(f"control-fsdp{target}", Role.CONTROL, target),
        damage=damage,
    )


def plot_numbers(item: Item) -> dict[str, Any]:
    """What the judge stores beside the rows that are drawn."""
    loss = [4.1 * 0.97**n for n in range(len(STEPS))]
    restored = [y * (1 + 2e-5 * (n % 3)) for n, y in enumerate(loss)]
    rates = [[1e-3 * (1 - n / 20), 5e-4 * (1 - n / 20)] for n in range(len(STEPS))]
    count = len(STEPS)
    return {
        Item.LOSS: {
            "steps": STEPS,
            "reference": loss,
            "restored": restored,
            "deviation": [abs(a - b) / b for a, b in zip(restored, loss, strict=True)],
            "band": 1e-4,
            "band_from": "2 repeats and the control, times 3",
        },
        Item.SCHEDULER: {"steps": STEPS, "reference": rates, "restored": rates},
        Item.DATA: {
            "steps": STEPS,
            "missing": [0] * count,
            "repeated": [0] * count,
            "foreign": [0] * count,
            "reordered": [False] * count,
            "global_batch": [16] * count,
        },
        Item.UPDATES: {
            "step": 9,
            "cosine": 0.99999,
            "norm_ratio": 1.0001,
            "distance": 2e-4,
            "band": 1e-3,
            "furthest": {
                "blocks.0.attn.qkv.weight": [0.99998, 1.0001],
                "lm_head.weight": [0.99991, 0.9999],
            },
        },
        Item.KEYS: {"parameter_dtypes": {"torch.float32": 48}},
    }.get(item, {})


def make_checks(
    restore: str, broken: Item | None = None, subjects: Sequence[str] = ()
) -> tuple[Check, ...]:
    """One row per item, all held but `broken`."""
    items = [item for item in Item if item not in (Item.DAMAGE, Item.GENERATION)]
    return tuple(
        Check(
            item=item,
            status=Held.BROKEN if item is broken else Held.HELD,
            summary=f"{item} differ from the source at step 8"
            if item is broken
            else f"{item}: equal to the source run at step 8 on all ranks",
            subjects=tuple(subjects) if item is broken else (),
            facts=(f"launches/{restore}/rank0.jsonl:12", f"launches/{restore}/rank1.jsonl:14"),
            numbers=plot_numbers(item),
        )
        for item in items
    )


def make_verdict(
    plan: Plan,
    word: VerdictWord = VerdictWord.PASS,
    reason: Reason = Reason.HELD,
    *,
    blame: Item | None = None,
    subject: str | None = None,
    explanation: str = "every state item held, and the next 9 steps continue the reference",
) -> Verdict:
    return Verdict(
        cell_id=plan.cell.id,
        claim=plan.claim,
        word=word,
        reason=reason,
        explanation=explanation,
        blame_item=blame,
        blame_subject=subject,
        checks=make_checks(plan.restore.id, blame, (subject,) if subject else ()),
        facts=(f"launches/{plan.restore.id}/rank0.jsonl:12",),
        numbers={
            "phases": {
                "read": 0.21,
                "deserialize": 0.08,
                "initialize": 1.4,
                "validate": 0.05,
                "merged": ["reshard", "read"],
            },
            "wall_s": 2.1,
            "step_s": 0.05,
        },
    )


def stored(plan: Plan, verdict: Verdict | None) -> StoredCell:
    value = None
    if verdict is not None:
        expect = plan.cell.expect
        value = to_json(verdict) | {
            "expected": verdict.meets(expect),
            "expectation": to_json(expect),
        }
    return StoredCell(plan.cell.id, to_json(plan), value, None, replayable=True)


RUN = {
    "format": 1,
    "status": "judged",
    "started_utc": "2026-03-02T04:00:00Z",
    "ended_utc": "2026-03-02T04:03:05Z",
    "argv": ["ckptdrill", "run", "matrices/quickstart.yaml"],
    "versions": {"ckptdrill": "0.1.0", "python": "3.11.9"},
    "environments": {"default": {"python": "3.11.9", "torch": "2.13.0", "cuda": None}},
    "launcher": {"used": "warm", "equivalence": {"same": True, "facts": 212}},
    "guard": {"level": "read-only bind", "files": 9},
    "source_unchanged": True,
    "matrix": "quickstart",
    "git_head": "8c0ffee",
    "node": {"cores": 2, "gpus": 0, "storage": "xfs"},
}


@pytest.fixture
def run_json() -> dict[str, Any]:
    return dict(RUN)


@pytest.fixture
def passing() -> Callable[[str], StoredCell]:
    def build_one(cell_id: str) -> StoredCell:
        plan = make_plan(cell_id)
        return stored(plan, make_verdict(plan))

    return build_one


@pytest.fixture
def all_three() -> list[StoredCell]:
    """One cell of every severity, the best one first."""
    cells = [("a-pass", VerdictWord.PASS, Reason.HELD, None)]
    cells += [("b-unproven", VerdictWord.UNPROVEN, Reason.NOT_EXERCISED, None)]
    cells += [("c-refused", VerdictWord.UNSUPPORTED, Reason.REFUSED, None)]
    cells += [("d-diverged", VerdictWord.UNSUPPORTED, Reason.DIVERGED, Item.SCHEDULER)]
    made = []
    for cell_id, word, reason, blame in cells:
        plan = make_plan(cell_id)
        verdict = make_verdict(plan, word, reason, blame=blame, explanation=f"why {cell_id}")
        made.append(stored(plan, verdict))
    return made


@pytest.fixture
def store_run(tmp_path: Path) -> Callable[..., RunFolder]:
    """Write a run folder as a run leaves it, before its packet is derived."""

    def write_one(cells: Sequence[StoredCell], about: dict[str, Any] | None = None) -> RunFolder:
        run = RunFolder(tmp_path / "run")
        store.write_json(run.run_json, about or RUN)
        store.write_atomic(run.matrix, "matrix: quickstart\n")
        for cell in cells:
            store.write_json(run.cell(cell.id) / "plan.json", cell.plan)
            if cell.verdict is not None:
                store.write_json(run.cell(cell.id) / "verdict.json", cell.verdict)
            store.write_atomic(run.cell(cell.id) / "repro.sh", "#!/bin/sh\nexit 0\n")
        return run

    return write_one
