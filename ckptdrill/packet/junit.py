"""`junit.xml`: every cell as a test case, for continuous integration. Pure.

A cell that came out as expected is a passed case, with the owner's words where it is no Pass. An
unexpected Unsupported is a failure, an unexpected Unproven an error. An Unproven cell of the
planned path is an error even where the matrix expects it: what a migration depends on is never
skipped. Only an expected Unproven elsewhere is.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from ckptdrill.model import VerdictWord
from ckptdrill.packet.text import visible
from ckptdrill.packet.view import CellView, PacketView


def render(view: PacketView) -> str:
    """The text of junit.xml, ending with a line feed."""
    suite = ET.Element("testsuite", {"name": visible(view.run.matrix)})
    if view.run.started_utc:
        suite.set("timestamp", visible(view.run.started_utc)[:19])
    for cell in sorted(view.cells, key=lambda cell: cell.id):
        suite.append(_case(view.run.matrix, cell))
    suite.append(_source(view))
    if not view.cells:
        case = _element(suite, "testcase", name="cells", classname=visible(view.run.matrix))
        _element(case, "error", message="this run has no cells: nothing was proven", type="not-run")
    _count(suite)
    root = ET.Element("testsuites", {"name": "ckptdrill"})
    root.append(suite)
    _count(root)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(matrix: str, cell: CellView) -> ET.Element:
    took_s = sum(seconds for _, seconds in cell.phases.seconds) if cell.phases else 0.0
    case = ET.Element("testcase", {"name": visible(cell.id), "classname": visible(matrix)})
    case.set("time", f"{took_s:.3f}")
    kind = outcome(cell)
    if kind is not None:
        said = _element(case, kind, message=visible(cell.explanation))
        if kind != "skipped":
            said.set("type", cell.reason)
        said.text = visible(f"next: {cell.next_move}" if cell.next_move else "")
    elif cell.word is not VerdictWord.PASS:
        why = cell.expectation.why if cell.expectation else ""
        words = f"{cell.word} ({cell.reason}), as expected: {why or 'no reason given'}"
        _element(case, "system-out").text = visible(f"{words}. {cell.explanation}")
    return case


def outcome(cell: CellView) -> str | None:
    """`failure`, `error`, `skipped`, or None for a case that passed."""
    if cell.word is VerdictWord.UNPROVEN:
        return "skipped" if cell.expected and not cell.planned else "error"
    return None if cell.expected else "failure"


def _source(view: PacketView) -> ET.Element:
    """The guard of the source checkpoints, whose failure voids every cell."""
    name = "the source checkpoint did not change"
    case = ET.Element("testcase", {"name": name, "classname": visible(view.run.matrix)})
    if view.run.source_unchanged is False:
        what = "; ".join(view.run.source_changes[:5]) or "a source checkpoint changed"
        _element(case, "error", message=visible(what), type="source-changed")
    elif view.run.source_unchanged is None:
        message = "not recorded: the run has not come to its end"
        _element(case, "error", message=message, type="not-run")
    return case


def _element(parent: ET.Element, tag: str, **attributes: str) -> ET.Element:
    return ET.SubElement(parent, tag, attributes)


def _count(element: ET.Element) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        element.set(name, str(sum(case.find(tag) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
