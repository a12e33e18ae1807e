"""A packet shows what is documented beside what was drilled, and the disagreements first."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from ckptdrill import claims
from ckptdrill.claims import Agreement
from ckptdrill.model import Item, Reason, VerdictWord, to_json
from ckptdrill.packet import StoredCell, build, html, machine, markdown
from ckptdrill.packet.documented import UNNAMED
from tests.packet.conftest import make_plan, make_verdict, stored

Passing = Callable[[str], StoredCell]


def cell(
    cell_id: str, word: VerdictWord = VerdictWord.PASS, reason: Reason = Reason.HELD
) -> StoredCell:
    """4 to 2 ranks; Unsupported cells lost the moments."""
    plan = make_plan(cell_id)
    blame = Item.MOMENTS if reason is Reason.DIVERGED else None
    return stored(plan, make_verdict(plan, word, reason, blame=blame))


def test_disagreements_stand_first(run_json: dict[str, Any]) -> None:
    run_json["stack"] = "dcp-fsdp2"
    view = build(run_json, [cell("a", VerdictWord.UNSUPPORTED, Reason.DIVERGED)])
    agreements = [each.agreement for each in view.cells[0].documented]
    assert agreements == sorted(agreements, key=list(Agreement).index)
    assert agreements[0] is Agreement.CONTRADICTED
    assert view.disagreements[0][1].claim.id == "dcp-resharding"


def test_the_page_shows_claim_and_verdict_side_by_side(run_json: dict[str, Any]) -> None:
    run_json["stack"] = "dcp-fsdp2"
    page = html.render(build(run_json, [cell("a", VerdictWord.UNSUPPORTED, Reason.DIVERGED)]))
    assert "Documentation and drill" in page
    assert "You can load in the same world size or different world size." in page
    assert Agreement.CONTRADICTED in page
    assert "read 2026-11-30" in page
    assert "href=&#34;https" not in page
    assert 'href="https' not in page


def test_the_page_says_when_nothing_disagrees(run_json: dict[str, Any]) -> None:
    run_json["stack"] = "dcp-fsdp2"
    page = html.render(build(run_json, [cell("a")]))
    assert "0 disagreements" in page
    assert Agreement.CONFIRMED in page


def test_what_holds_beyond_its_documentation_is_listed(run_json: dict[str, Any]) -> None:
    run_json["stack"] = "deepspeed-native"
    view = build(run_json, [cell("a")])
    beyond = [each.claim.id for _, each in view.disagreements]
    assert beyond == ["zero-native-world-size", "zero-3-elastic"]
    text = markdown.render(view)
    assert "## Documentation of DeepSpeed ZeRO, native: 2 disagreements" in text
    assert f"| Pass, held | {Agreement.BEYOND} |" in text


def test_the_markdown_puts_disagreeing_cells_first(run_json: dict[str, Any]) -> None:
    run_json["stack"] = "dcp-fsdp2"
    plan = make_plan("c", drill="corrupt-shard")
    refused = make_verdict(plan, VerdictWord.UNSUPPORTED, Reason.REFUSED)
    worst = stored(plan, refused)  # sorted before b, but no document speaks against it
    text = markdown.render(build(run_json, [worst, cell("b")]))
    assert Agreement.UNDOCUMENTED in text
    assert Agreement.CONFIRMED in text
    run_json["stack"] = "deepspeed-native"
    rows = markdown.render(build(run_json, [worst, cell("b")])).partition("## Documentation")[2]
    assert rows.index(Agreement.BEYOND) < rows.index(Agreement.UNDOCUMENTED)


def test_packet_json_cites_claims_by_id_and_holds_each_once(run_json: dict[str, Any]) -> None:
    run_json["stack"] = "dcp-fsdp2"
    value = json.loads(machine.render(build(run_json, [cell("a"), cell("b")])))
    documentation = value["documentation"]
    assert documentation["stack"]["title"] == "PyTorch DCP, FSDP2"
    cited = {each["claim"] for entry in value["cells"] for each in entry["documented"]}
    assert cited == documentation["claims"].keys()
    assert documentation["claims"]["dcp-resharding"]["source"]["version"]


def test_the_schema_knows_every_agreement() -> None:
    items = machine.packet_schema()["$defs"]["cell"]["properties"]["documented"]["items"]
    assert items["properties"]["agreement"]["enum"] == [each.value for each in Agreement]


@pytest.mark.parametrize("stack", [None, "", "posix:<b>", 7, ["dcp-fsdp2"]])
def test_without_a_known_stack_the_packet_says_so(
    run_json: dict[str, Any], passing: Passing, stack: Any
) -> None:
    run_json["stack"] = stack
    view = build(run_json, [passing("a")])
    assert view.cells[0].documented == ()
    assert UNNAMED in html.render(view)
    assert "stack not named" in markdown.render(view)
    value = json.loads(machine.render(view))
    assert value["documentation"] == {"stack": None, "disagreements": 0, "claims": {}}


def test_a_cell_that_nobody_drilled_shows_no_launches(run_json: dict[str, Any]) -> None:
    run_json["stack"] = "megatron-dp-reshardable"
    plan = make_plan("a", drill="tp-change")
    target = dataclasses.replace(plan.cell.target, tp=2)
    plan = dataclasses.replace(
        plan, cell=dataclasses.replace(plan.cell, target=target, drilled=False)
    )
    verdict = dataclasses.replace(
        make_verdict(plan, VerdictWord.UNSUPPORTED, Reason.DOCUMENTED_LIMIT), checks=()
    )
    view = build(run_json, [StoredCell("a", to_json(plan), to_json(verdict))])
    assert view.cells[0].launches == ()
    assert {each.agreement for each in view.cells[0].documented} == {Agreement.OPEN}


def test_a_stack_is_named_as_the_claims_name_it() -> None:
    assert claims.stack("dcp-fsdp2").title == "PyTorch DCP, FSDP2"
