"""junit.xml as its readers see it: what counts as passed, failed, in error or skipped."""

from collections.abc import Callable
from typing import Any

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped

from ckptdrill.model import Expectation, Reason, VerdictWord
from ckptdrill.packet import StoredCell, build, junit
from tests.packet.conftest import make_plan, make_verdict, stored

UNPROVEN = (VerdictWord.UNPROVEN, Reason.NOT_EXERCISED)
REFUSED = (VerdictWord.UNSUPPORTED, Reason.REFUSED)
PASS = (VerdictWord.PASS, Reason.HELD)


def one(found: tuple[VerdictWord, Reason], *, expected: bool, planned: bool = True) -> StoredCell:
    word = found[0] if expected else VerdictWord.PASS
    plan = make_plan("a", expect=Expectation(word, None, "known & wanted"))
    cell = stored(plan, make_verdict(plan, *found, explanation="<why> \x1b]&"))
    cell.plan["cell"]["planned"] = planned
    return cell


def cases(run_json: dict[str, Any], *cells: StoredCell) -> dict[str, Any]:
    xml = JUnitXml.fromstring(junit.render(build(run_json, cells)).encode())
    return {case.name: case for suite in xml for case in suite}


@pytest.mark.parametrize(
    ("cell", "outcome"),
    [
        (one(PASS, expected=True), []),
        (one(REFUSED, expected=True), []),
        (one(REFUSED, expected=False), [Failure]),
        (one(UNPROVEN, expected=False), [Error]),
        (one(UNPROVEN, expected=False, planned=False), [Error]),
        (one(UNPROVEN, expected=True, planned=True), [Error]),
        (one(UNPROVEN, expected=True, planned=False), [Skipped]),
    ],
)
def test_what_a_cell_counts_as(
    run_json: dict[str, Any], cell: StoredCell, outcome: list[type]
) -> None:
    found = cases(run_json, cell)["a"].result
    assert [type(each) for each in found] == outcome
    assert all("<why>" in each.message for each in found)


def test_an_expected_failure_says_why(run_json: dict[str, Any]) -> None:
    assert "known & wanted" in cases(run_json, one(REFUSED, expected=True))["a"].system_out


def test_counts_are_those_of_the_cases(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    xml = JUnitXml.fromstring(junit.render(build(run_json, all_three)).encode())
    assert (xml.tests, xml.failures, xml.errors, xml.skipped) == (5, 2, 1, 0)


@pytest.mark.parametrize(("unchanged", "errors"), [(True, 0), (False, 1), (None, 1)])
def test_a_source_that_changed_is_an_error(
    run_json: dict[str, Any],
    passing: Callable[[str], StoredCell],
    unchanged: bool | None,
    errors: int,
) -> None:
    view = build(run_json | {"source_unchanged": unchanged}, [passing("a")])
    assert JUnitXml.fromstring(junit.render(view).encode()).errors == errors


def test_a_run_without_cells_is_an_error(run_json: dict[str, Any]) -> None:
    assert JUnitXml.fromstring(junit.render(build(run_json, [])).encode()).errors == 1
