"""`index.html`: the packet as one self-contained page. Pure.

Every value goes through autoescaping templates and is never joined to markup anywhere else. The
page asks nobody for anything: a content policy allows its one style sheet and its one script, both
named by their hash, and no connection at all.

Up to `INLINE_CELLS` cells the page is complete without its script, which then only filters and
opens. In a longer one that holds for the `WORST_CELLS` first ones; what is behind the others is
packed (JSON, gzip, base64), and the script unpacks it when a cell is opened or the page is printed:
a thousand cells would otherwise be some 15 MB. The lines of facts that a cell rests on are shown in
a long page only where it did not pass.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from ckptdrill.claims import Agreement
from ckptdrill.model import Held, VerdictWord
from ckptdrill.packet import cost, documented, plots, text
from ckptdrill.packet.view import ApprovalView, CellView, CheckView, GateRow, PacketView

INLINE_CELLS = 100
WORST_CELLS = 25
_TEMPLATES = Path(__file__).with_name("templates")
_KINDS = ("diverged", "unsupported", "unproven", "pass")
_MARKS = {
    Held.HELD: "pass",
    Held.BROKEN: "unsupported",
    Held.NOT_OBSERVED: "unproven",
    Held.NOT_EXERCISED: "unproven",
    Held.OUT_OF_SCOPE: "scope",
}
_AGREEMENT_MARKS = {
    Agreement.CONTRADICTED: "unsupported",
    Agreement.BEYOND: "unproven",
    Agreement.CONFIRMED: "pass",
}
_STANDING_MARKS = {"held": "pass", "not held": "unsupported"}
_MEANINGS = {
    "pass": "the drill ran, and what it claims held, with evidence",
    "unproven": "no executed test, or the evidence is incomplete: blocks a migration",
    "unsupported": "refused, crashed, hung or excluded: it fails where one can see it",
    "diverged": "it ran on as another training, and nothing said so",
}


def render(
    view: PacketView, approval: ApprovalView | None = None, gate: Sequence[GateRow] = ()
) -> str:
    """The text of index.html, ending with a line feed; with an approval, that of approved.html.

    `gate` are the conditions that the packet decides by itself.
    """
    environment = _environment()
    fragment = environment.get_template("cell.html.j2")
    inline = WORST_CELLS if _is_long(view.cells) else len(view.cells)
    bodies = [
        Markup(  # noqa: S704 - autoescaped
            fragment.render(cell=cell, stack=view.run.stack, plots=plots.of_cell(cell))
        )
        for cell in _shortened(view.cells)
    ]
    style, script = _asset("page.css"), _asset("page.js")
    return environment.get_template("page.html.j2").render(
        view=view,
        approval=approval,
        gate=gate,
        ledger=cost.of_packet(view),
        bodies=bodies[:inline],
        packed=_pack(bodies[inline:]) if inline < len(bodies) else "",
        words=tuple(VerdictWord),
        style=style,
        script=script,
        policy=_policy(style, script),
    )


def _is_long(cells: Sequence[CellView]) -> bool:
    return len(cells) > INLINE_CELLS


def _shortened(cells: Sequence[CellView]) -> Iterator[CellView]:
    """In a long page a cell that passed is shown without the lines that it rests on."""
    for cell in cells:
        passed = cell.word is VerdictWord.PASS
        yield replace(cell, lines=()) if passed and _is_long(cells) else cell


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "visible": text.visible,
        "seconds": text.seconds,
        "counted": text.counted,
        "link_target": text.link_target,
    }
    environment.globals |= {
        "kind": _kind,
        "marks": _MARKS,
        "agreement_mark": _agreement_mark,
        "untold": _untold,
        "stack_unnamed": documented.UNNAMED,
        "meanings": _MEANINGS,
        "standing_mark": lambda standing: _STANDING_MARKS.get(standing, "unproven"),
        "plot_width": plots.WIDTH,
        "plot_height": plots.HEIGHT,
    }
    return environment


def _kind(cell: CellView) -> str:
    """The style class, shape and filter of a cell."""
    return _KINDS[cell.severity]


def _untold(check: CheckView) -> tuple[list[str], list[str]]:
    """Subjects and details of a row without what its name, summary or a detail says already."""
    details = [detail for detail in check.details if detail != check.summary]
    told = "\n".join((check.item, check.summary, *details))
    return [subject for subject in check.subjects if subject not in told], details


def _agreement_mark(agreement: Agreement) -> str:
    """The style class and shape of an agreement; what agrees as a failure does not stand out."""
    return _AGREEMENT_MARKS.get(agreement, "scope")


def _asset(name: str) -> Markup:
    """A file of ours, which goes into the page as it is."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704 - our own file


def _policy(style: str, script: str) -> str:
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_source_of(style)}; script-src {_source_of(script)}"
    )


def _source_of(content: str) -> str:
    """How a content policy names an inline element."""
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _pack(bodies: list[Markup]) -> str:
    plain = json.dumps([str(body) for body in bodies]).encode()
    return base64.b64encode(gzip.compress(plain, mtime=0)).decode()
