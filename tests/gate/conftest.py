"""A packet, a checkpoint and an approval for which all conditions hold, to break one at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptdrill import gate, manifest, packet, store
from ckptdrill.gate import Condition, Inputs, Options, Standing
from ckptdrill.gate import inputs as gate_inputs
from ckptdrill.model import Check, Held, Item, Reason, Verdict, VerdictWord
from ckptdrill.packet import StoredCell
from ckptdrill.store import RunFolder
from tests.packet.conftest import RUN, make_plan, make_verdict, stored

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
ENDED_S = 1_772_424_185.0  # 2026-03-02T04:03:05Z
HOUR_S = 3600.0
INSTALLED = {"python": "3.11.9", "torch": "2.13.0"}
MATRIX = """
policy:
  rng: {same_world_size: continued, other_world_size: not_guaranteed}
  approved: {software.numpy: array code only}
"""


def with_row(item: Item, status: Held) -> StoredCell:
    """A passed cell of which one row has this status."""

    def changed(check: Check) -> Check:
        return replace(check, status=status) if check.item is item else check

    plan = make_plan("a")
    verdict = make_verdict(plan)
    return stored(plan, replace(verdict, checks=tuple(map(changed, verdict.checks))))


def passed(name: str = "a") -> StoredCell:
    plan = make_plan(name)
    return stored(plan, make_verdict(plan))


def unproven(name: str = "b") -> StoredCell:
    plan = make_plan(name)
    verdict: Verdict = make_verdict(plan, VerdictWord.UNPROVEN, Reason.EVIDENCE_MISSING)
    return stored(plan, verdict)


def fell_back() -> StoredCell:
    plan = make_plan("d", damaged=True)
    return stored(plan, make_verdict(plan, VerdictWord.PASS, Reason.FELL_BACK))


def kept_whole(older: int) -> StoredCell:
    """A save that was interrupted everywhere; so many points left an older generation."""
    plan = make_plan("d")
    row = Check(Item.GENERATION, Held.HELD, "5 points", numbers={"counts": {"older": older}})
    verdict = make_verdict(plan)
    return stored(plan, replace(verdict, checks=(*verdict.checks, row)))


@dataclass
class Case:
    """What is made into files, and what the gate is told."""

    folder: Path
    cells: list[StoredCell] = field(default_factory=lambda: [passed(), fell_back()])
    about: dict[str, Any] = field(default_factory=dict)
    matrix: str = MATRIX
    installed: dict[str, str] = field(default_factory=lambda: dict(INSTALLED))
    options: dict[str, Any] = field(default_factory=dict)
    now_s: float = ENDED_S + HOUR_S
    approved: bool = True
    after: Callable[["Case"], object] | None = None

    @property
    def root(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "model.pt"

    @property
    def program(self) -> Path:
        return self.folder / "train.py"

    def write(self) -> None:
        """The packet, the checkpoint with its manifest, the script, the approval."""
        self.program.write_text("print('train')\n")
        about = {
            "installed": {"default": INSTALLED},
            "image_digest": "sha256:aa",
            "program": str(self.program),
            "program_sha256": store.sha256_of(self.program),
        }
        run = RunFolder(self.root)
        store.write_json(run.run_json, RUN | about | self.about)
        store.write_atomic(run.matrix, self.matrix)
        for cell in self.cells:
            store.write_json(run.cell(cell.id) / "plan.json", cell.plan)
            store.write_json(run.cell(cell.id) / "verdict.json", cell.verdict)
        packet.write(run)
        self._write_checkpoint()
        if self.approved:
            gate.approval.record(self.root, "a release manager", "2026-03-02T05:00:00Z", (), KEY)
        if self.after:
            self.after(self)

    def _write_checkpoint(self) -> None:
        torch.save({"w": torch.arange(4)}, self.checkpoint)
        manifest.commit(self.checkpoint, manifest.describe(self.checkpoint))

    def inputs(self, monkeypatch: pytest.MonkeyPatch) -> Inputs:
        monkeypatch.setattr(gate_inputs, "installed", lambda _: self.installed)
        told = {
            "checkpoint": self.checkpoint,
            "python": "python",
            "program": None,
            "image_digest": "sha256:aa",
            "max_age_s": 24 * HOUR_S,
            "trusted": PUBLIC,
        }
        return gate.gather(self.root, Options(**told | self.options), self.now_s)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def open_ones(found: tuple[Condition, ...]) -> dict[str, Standing]:
    """The conditions that are not held, with their standing."""
    return {each.name: each.standing for each in found if each.standing is not Standing.HELD}
