"""The page: complete, inert whatever a job was named, and quick for a thousand cells."""

import base64
import dataclasses
import gzip
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from ckptdrill.model import Expectation, Item, Reason, VerdictWord
from ckptdrill.packet import StoredCell, build, html, markdown

Passing = Callable[[str], StoredCell]
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "</style></script><b>",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe",
    "a\u200bb\x00c\ud800",
)


class Page(HTMLParser):
    """Every element and attribute of a page, and the text that a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def hostile_cell(cell: StoredCell, name: str) -> StoredCell:
    """`name` wherever a job or a file could have put it."""
    row = cell.verdict["checks"][0]
    row |= {"summary": name, "subjects": [name], "details": [name], "next_move": name}
    row |= {"facts": [name], "numbers": {}}
    for other in cell.verdict["checks"]:
        if other["item"] == Item.UPDATES:
            other["numbers"]["furthest"] = {name: [0.5, 1.5]}
        if other["item"] == Item.LOSS:
            other["numbers"]["band_from"] = name
    cell.verdict.update(explanation=name, blame_subject=name, next_move=name, facts=[name])
    cell.plan["cell"]["parameters"] = {name: name}
    cell.plan["cell"]["source"]["name"] = name
    cell.plan["cell"]["drill"] = name
    cell.plan["restore"]["id"] = name
    return cell


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_text(run_json: dict[str, Any], passing: Passing, name: str) -> None:
    run_json |= {"matrix": name, "versions": {name: name}, "environments": {name: {name: name}}}
    run_json |= {"argv": [name], "git_head": name, "status": name}
    hostile = html.render(build(run_json, [hostile_cell(passing("a"), name)]))
    page, plain = Page(hostile), Page(html.render(build(run_json, [passing("a")])))
    hostile.encode()
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {"ul", "li"}
    assert len(page.all("script")) == 1
    names = {attribute for _, attributes in page.elements for attribute in attributes}
    assert not [attribute for attribute in names if attribute.startswith("on")]
    addresses = {attributes.get("href") or "" for _, attributes in page.elements}
    assert all(re.match(r"#|launches/|cells/|matrix\.yaml|run\.json|$", a) for a in addresses)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\x00]", hostile)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_cannot_shape_the_markdown(
    run_json: dict[str, Any], passing: Passing, name: str
) -> None:
    text = markdown.render(build(run_json, [hostile_cell(passing("a"), name + "|\n| `x`[y](z)")]))
    text.encode()
    (row,) = [line for line in text.splitlines() if line.startswith("| ✔")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 7
    assert "<" not in row
    assert not re.search(r"(?<!\\)[`\[]", row)


def test_the_page_asks_nobody_for_anything(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    text = html.render(build(run_json, all_three))
    page = Page(text)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not [a for _, a in page.elements if "src" in a or "style" in a]
    assert "http://" not in text
    assert "https://" not in text


def test_every_verdict_has_its_colour_shape_and_word(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    page = Page(html.render(build(run_json, all_three)))
    labels = [chip["aria-label"] for chip in page.all("a") if "chip" in (chip.get("class") or "")]
    assert labels == [
        "Unsupported, diverged: fsdp4 → fsdp2, dp-shrink",
        "Unsupported, refused: fsdp4 → fsdp2, dp-shrink",
        "Unproven, not-exercised: fsdp4 → fsdp2, dp-shrink",
        "Pass, held: fsdp4 → fsdp2, dp-shrink",
    ]
    shapes = {use["href"] for use in page.all("use")}
    symbols = {f"#{symbol['id']}" for symbol in page.all("symbol")}
    assert shapes <= symbols
    assert len(symbols) == 5


def test_every_link_inside_the_page_has_its_target(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    page = Page(html.render(build(run_json, all_three)))
    targets = {f"#{attributes['id']}" for _, attributes in page.elements if "id" in attributes}
    links = {a["href"] for a in page.all("a") if (a.get("href") or "").startswith("#")}
    assert links <= targets


def test_the_page_leads_with_the_sentence_then_the_worst_cell(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    view = build(run_json, all_three)
    page = Page(html.render(view))
    assert view.headline in page.text
    cells = page.all("details")
    assert [cell["data-kind"] for cell in cells] == ["diverged", "unsupported", "unproven", "pass"]
    assert ["open" in cell for cell in cells] == [True, False, False, False]


def test_expectation_and_why_are_shown(run_json: dict[str, Any], passing: Passing) -> None:
    expectation = Expectation(VerdictWord.UNSUPPORTED, Reason.REFUSED, "local shards only")
    cell = passing("a")
    cell.plan["cell"]["expect"] = dataclasses.asdict(expectation)
    cell.verdict.update(word="Unsupported", reason="refused", expected=True)
    page = Page(html.render(build(run_json, [cell])))
    assert "As the matrix expects: local shards only" in page.text
    cell.verdict.update(reason="crashed", expected=False)
    page = Page(html.render(build(run_json, [cell])))
    assert "The matrix expects Unsupported (refused): local shards only" in page.text
    assert "against expectation" in page.text


def test_a_damage_without_record_is_said_to_be_unknown(
    run_json: dict[str, Any], passing: Passing
) -> None:
    cell = passing("a")
    cell.plan["damage"] = {
        "id": "flip-a",
        "kind": "bit-flip",
        "checkpoint": {"launch_id": "source-fsdp4", "step": 8},
    }
    page = Page(html.render(build(run_json, [cell])))
    assert "The damage left no record" in page.text
    record = {"files": [{"path": "s/0", "sha256_before": "a" * 64, "sha256_after": "b" * 64}]}
    page = Page(html.render(build(run_json, [dataclasses.replace(cell, damage=record)])))
    assert "aaaaaaaaaaaa" in page.text
    assert "bbbbbbbbbbbb" in page.text


def test_an_unfinished_run_and_a_changed_source_raise_the_alarm(
    run_json: dict[str, Any], passing: Passing
) -> None:
    run_json |= {"status": "ran", "source_unchanged": False}
    page = Page(html.render(build(run_json, [passing("a")])))
    assert "status “ran”" in page.text
    assert "trust nothing in this packet" in page.text


@pytest.mark.parametrize("about", [{}, {"environments": []}, {"versions": "x", "argv": "y"}])
def test_a_poor_run_json_still_gives_a_page(about: dict[str, Any], passing: Passing) -> None:
    assert "not recorded" in Page(html.render(build(about, [passing("a")]))).text


def test_a_run_without_cells_says_that_nothing_was_proven(run_json: dict[str, Any]) -> None:
    assert "nothing was proven" in Page(html.render(build(run_json, []))).text


def test_a_thousand_cells_are_rendered_in_seconds_and_stay_small(
    run_json: dict[str, Any], passing: Passing
) -> None:
    view = build(run_json, [passing(f"cell-{number:04}") for number in range(1000)])
    started = time.process_time()
    text = html.render(view)
    took_s = time.process_time() - started
    sys.stdout.write(f"1,000 cells: {took_s:.2f} s of CPU, {len(text.encode()) / 1e6:.2f} MB\n")
    assert took_s < 5
    assert len(text.encode()) < 5_000_000
    packed = re.search(r'id="packed">([^<]+)<', text)
    assert packed is not None
    bodies = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert len(bodies) == 1000 - html.WORST_CELLS
    assert text.count("<h3>State inventory</h3>") == html.WORST_CELLS
    assert all("State inventory" in body for body in bodies)
