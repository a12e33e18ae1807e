"""`packet.md`: the packet on one screen, for a pull request or a step summary. Pure.

One line that sums up, one table with the worst cell first. Names come from jobs, so everything that
Markdown or HTML would act upon is escaped.
"""

from __future__ import annotations

import re

from ckptdrill.packet.documented import UNNAMED
from ckptdrill.packet.text import counted, visible
from ckptdrill.packet.view import CellView, PacketView

_MOST_CELLS = 200
_ACTIVE = re.compile(r"([\\`*_\[\]|~$])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": ":&#47;/"}
_GLYPH = ("◆", "■", "▲", "✔")  # by severity: diverged, Unsupported, Unproven, Pass


def render(view: PacketView) -> str:
    """The text of packet.md, ending with a line feed."""
    run = view.run
    lines = [f"# {escape(view.headline)}", ""]
    if run.source_unchanged is False:
        lines += ["**The source checkpoint changed under the run: trust nothing in it.**", ""]
    when = f", {escape(run.started_utc)}" if run.started_utc else ""
    lines += [f"Matrix {escape(run.matrix)}{when}. Exit code {int(view.exit_code)}: "]
    lines[-1] += f"{escape(view.exit_meaning)}."
    if view.cells:
        lines += ["", "| Verdict | Reason | Source → target | Drill | Blame | What it means |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        lines += [_row(cell) for cell in view.cells[:_MOST_CELLS]]
    if len(view.cells) > _MOST_CELLS:
        rest = counted(len(view.cells) - _MOST_CELLS, "further cell")
        lines += ["", f"{rest}: see index.html or packet.json."]
    lines += _documentation(view) if view.cells else []
    lines += ["", "Details, plots and the facts behind each verdict: index.html in this folder."]
    return "\n".join(lines) + "\n"


def _documentation(view: PacketView) -> list[str]:
    """What documents claim beside what the drills showed; per cell the gravest, worst first."""
    stack = view.run.stack
    if stack is None:
        return ["", f"Documentation: {escape(UNNAMED)}."]
    cells = [cell for cell in view.cells if cell.documented]
    cells.sort(key=lambda cell: not cell.documented[0].agreement.disagrees)
    count = counted(len(view.disagreements), "disagreement")
    lines = ["", f"## Documentation of {escape(stack.title)}: {count}", ""]
    if not cells:
        return [*lines, "No claim speaks of these cells."]
    lines += ["| Source → target | Drill | Documented | Verdict | Agreement | What it says |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    return lines + [_claims_row(cell) for cell in cells[:_MOST_CELLS]]


def _claims_row(cell: CellView) -> str:
    first = cell.documented[0]
    more = f" (+{len(cell.documented) - 1} more)" if len(cell.documented) > 1 else ""
    columns = (
        cell.route,
        cell.drill,
        f"{first.claim.label}, {first.claim.case}",
        f"{cell.word}, {cell.reason}",
        first.agreement,
        f"{first.claim.says}{more}",
    )
    return "| " + " | ".join(escape(column) for column in columns) + " |"


def _row(cell: CellView) -> str:
    blame = ": ".join(part for part in (cell.blame_item, cell.blame_subject) if part)
    means = [cell.explanation, cell.next_move]
    if cell.expectation is not None or not cell.expected:
        means.append("as the matrix expects" if cell.expected else "against expectation")
    columns = (
        f"{_GLYPH[cell.severity]} {cell.word}",
        cell.reason,
        cell.route,
        cell.drill if cell.cell else cell.id,
        blame or "–",
        "; ".join(part.rstrip(".") for part in means if part),
    )
    return "| " + " | ".join(escape(column) for column in columns) + " |"


def escape(text: str) -> str:
    """`text` without any meaning for Markdown or HTML, on one line."""
    plain = visible(text)
    for active, entity in _ENTITIES.items():
        plain = plain.replace(active, entity)
    return _ACTIVE.sub(r"\\\1", plain)
