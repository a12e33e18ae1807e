"""What the documentation claims, beside what the drill showed: one cell at a time. Pure.

The run records the stack that its matrix names. From it and the address of a cell come the claims
that the cell puts to the test; each is set against the verdict, and those that disagree come first:
documented but not so, and not promised but held. Nothing here changes a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptdrill import claims
from ckptdrill.claims import Agreement, DocumentedClaim, MigrationCase
from ckptdrill.model import Cell, JsonValue, Verdict, to_json

UNNAMED = "stack not named: with job.stack in the matrix, documented claims stand beside verdicts"
_ORDER = {agreement: number for number, agreement in enumerate(Agreement)}
_CASES = {case: number for number, case in enumerate(MigrationCase)}


@dataclass(frozen=True)
class ClaimView:
    """A documented claim and how the verdict of a cell stands to it."""

    claim: DocumentedClaim
    agreement: Agreement

    @property
    def short(self) -> str:
        """`Limit, tensor-parallel: holds beyond its documentation`."""
        return f"{self.claim.label}, {self.claim.case}: {self.agreement}"


def stack_of(name: JsonValue) -> claims.Stack | None:
    """The stack that a run names. Text of a stored file that is no known name counts as none."""
    return claims.stacks().get(name) if isinstance(name, str) else None


def beside(
    stack: claims.Stack | None, cell: Cell | None, verdict: Verdict
) -> tuple[ClaimView, ...]:
    """The claims that `cell` tests, disagreements first; none when stack or cell are unknown."""
    if stack is None or cell is None:
        return ()
    found = claims.for_cell(stack.id, cell.source, cell.target, cell.drill)
    views = [ClaimView(claim, claims.agreement(claim, verdict)) for claim in found]
    return tuple(sorted(views, key=lambda view: (_ORDER[view.agreement], _CASES[view.claim.case])))


def as_json(views: Iterable[ClaimView]) -> list[JsonValue]:
    """What packet.json holds of a cell: the claims by id, which its head has in full."""
    return [{"claim": view.claim.id, "agreement": view.agreement.value} for view in views]


def cited(cells: Iterable[Iterable[ClaimView]]) -> Iterator[tuple[str, JsonValue]]:
    """Every claim that some cell cites, once, by id and in full."""
    found = {view.claim.id: view.claim for views in cells for view in views}
    for claim_id in sorted(found):
        yield claim_id, to_json(found[claim_id])
