"""The page in a real Chromium: silent, inert, usable by keyboard, whole at each width and on paper.

What these tests see and a parser does not: what runs, what is asked of the network, where boxes
end up, which colours they have, and how long a thousand cells take to open.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.model import Expectation, Item, Reason, VerdictWord
from ckptdrill.packet import ApprovalView, PacketView, StoredCell, build, html
from tests.packet.chromium import EXECUTABLE, MISSING, NOTHING_SKIPPED, Chromium, Tab, opened
from tests.packet.conftest import RUN, make_plan, make_verdict, stored
from tests.packet.test_html import HOSTILE, hostile_cell

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(EXECUTABLE is None, reason=MISSING)]

LONG = "layers.0." * 60 + "weight"
WIDTHS = (1280, 390)
OPEN = '[...document.querySelectorAll("details[open]")].map((cell) => cell.id)'
SHOWN = '[...document.querySelectorAll("details.cell:not([hidden])")].map((cell) => cell.id)'
# An element that sticks out, unless an ancestor scrolls or cuts it.
STICKING_OUT = """
[...document.querySelectorAll("main *")].filter((each) => {
  const box = each.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1
    && !each.closest(".scroll, .hide, svg, .plots, code");
}).map((each) => each.outerHTML.slice(0, 120))
"""
# [top, bottom, left, right] of every block that a reader sees one below the other.
BLOCKS = """
["header > *", "main > *", ".cell > summary, .cell > .body > *", ".plots > figure"].map((which) =>
  [...document.querySelectorAll(which)].filter((each) => !each.matches(".hide, [hidden]"))
    .map((each) => each.getBoundingClientRect()).filter((box) => box.width && box.height)
    .map((box) => [box.top, box.bottom, box.left, box.right].map(Math.round)))
"""
# WCAG 2 contrast of the text of what is asked for, against the nearest background that is painted.
CONTRAST = """
(() => {
  const light = (rgb) => rgb.slice(0, 3).map((each) => each / 255)
    .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, n) => sum + each * [0.2126, 0.7152, 0.0722][n], 0);
  const parsed = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const found = parsed(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0.5) return found;
    }
    return [255, 255, 255];
  };
  const which = "h1, .lead, .note, .word b, .chip, .counts b, dt, th, .refs a, button, .pick";
  return [...document.querySelectorAll(which)].filter((each) => each.checkVisibility())
    .map((each) => {
      const both = [light(parsed(getComputedStyle(each).color)), light(behind(each))];
      both.sort((a, b) => b - a);
      return [(both[0] + 0.05) / (both[1] + 0.05), each.className || each.tagName];
    }).filter(([ratio]) => ratio < 4.5);
})()
"""


def cell(
    name: str, word: VerdictWord = VerdictWord.PASS, reason: Reason = Reason.HELD, **about: Any
) -> StoredCell:
    blame = about.pop("blame", None)
    subject = about.pop("subject", None)
    plan = make_plan(name, **about)
    verdict = make_verdict(plan, word, reason, blame=blame, subject=subject, explanation=name)
    return stored(plan, verdict)


def mixed() -> list[StoredCell]:
    """A cell of every severity, of two drills and two routes."""
    refused = Expectation(VerdictWord.UNSUPPORTED, Reason.REFUSED, "local shards only")
    return [
        cell("a-pass", target=3),
        cell("b-unproven", VerdictWord.UNPROVEN, Reason.NOT_EXERCISED),
        cell("c-refused", VerdictWord.UNSUPPORTED, Reason.REFUSED, expect=refused, damaged=True),
        cell(
            "d-diverged",
            VerdictWord.UNSUPPORTED,
            Reason.DIVERGED,
            blame=Item.SCHEDULER,
            subject="group.one",
            drill="dp-grow",
        ),
    ]


def hostile() -> PacketView:
    """Every name is one that would like to be markup, or to hide, or to burst the page."""
    names = (
        *HOSTILE,
        LONG,
        "\u05d0\u05d1\u05d2 \u0627\u0644\u0639",
        "<base href=//example.invalid>",
    )
    cells = [hostile_cell(cell(f"cell-{n}"), name) for n, name in enumerate(names)]
    about = RUN | {"matrix": HOSTILE[0], "argv": list(names), "status": LONG}
    about |= {"versions": {name: name for name in names}, "git_head": LONG}
    return build(about, cells)


APPROVAL = ApprovalView(HOSTILE[1], "2026-03-02T05:00:00Z", "ab" * 32, "cd" * 32, (("path", LONG),))


def thousand() -> PacketView:
    """Nine drills on fifty routes, one cell of a thousand diverged."""
    routes = [(f"cell-{n:04}", 1 + n % 50, f"drill-{n % 9}") for n in range(999)]
    cells = [cell(name, target=target, drill=drill) for name, target, drill in routes]
    diverged = (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    return build(RUN, [*cells, cell("worst", *diverged, blame=Item.RNG, subject=LONG)])


PAGES: dict[str, Callable[[], str]] = {
    "mixed": lambda: html.render(build(RUN, mixed())),
    "passed": lambda: html.render(build(RUN, [cell("only")])),
    "empty": lambda: html.render(build({}, [])),
    "hostile": lambda: html.render(hostile()),
    "approved": lambda: html.render(build(RUN, [cell("only")]), APPROVAL),
    "thousand": lambda: html.render(thousand()),
}


@dataclass(frozen=True)
class Pages:
    """A browser, and the folder in which a page is written when it is first wanted."""

    browser: Chromium
    folder: Path

    def address(self, name: str) -> str:
        path = self.folder / f"{name}.html"
        if not path.exists():
            path.write_text(PAGES[name](), encoding="utf-8")
        return path.as_uri()

    def open(self, name: str, width: int = 1280, **media: str) -> Any:
        return opened(self.browser, self.address(name), width, **media)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield Pages(browser, tmp_path_factory.mktemp("pages"))
    browser.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_silent_and_asks_nobody(pages: Pages, name: str) -> None:
    with pages.open(name) as tab:
        if name != "thousand":
            tab.run("document.querySelector('[data-open=yes]')?.click()")
        assert tab.problems == []
        assert tab.asked == [pages.address(name)]


def test_the_browser_would_have_seen_a_script_that_runs(pages: Pages, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<script>console.log(1); fetch('http://example.invalid'); x()</script>")
    with opened(pages.browser, page.as_uri()) as tab:
        assert {event.get("type") for event in tab.problems} >= {"log"}
        assert any("exceptionDetails" in event for event in tab.problems)
        assert len(tab.asked) == 2


def test_hostile_names_are_text(pages: Pages) -> None:
    with pages.open("hostile") as tab:
        tab.run("document.querySelector('[data-open=yes]').click()")
        assert tab.run("document.scripts.length") == 1
        assert tab.run("document.images.length + document.querySelectorAll('base').length") == 0
        assert tab.run("document.body.innerText.includes('<script>alert(1)</script>')")
        assert tab.run("document.body.innerText.includes('{{ 7 * 7 }}')")
        assert tab.problems == []


def test_filters_choose_the_cells(pages: Pages) -> None:
    def pick(value: str) -> str:
        return f"document.querySelector('[name=kind][value={value}]').click()"

    def choose(name: str, value: str) -> str:
        field = f"document.querySelector('[name={name}]')"
        return (
            f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('input', {{bubbles: 1}}))"
        )

    with pages.open("mixed") as tab:
        everything = ["cell-d-diverged", "cell-c-refused", "cell-b-unproven", "cell-a-pass"]
        assert tab.run(SHOWN) == everything
        tab.run(pick("pass"))
        assert tab.run(SHOWN) == everything[:3]
        assert tab.run("document.querySelector('output').textContent") == "3 of 4 shown"
        tab.run("document.querySelector('[name=unexpected]').click()")
        assert tab.run(SHOWN) == [everything[0], everything[2]]
        tab.run("document.querySelector('[name=unexpected]').click()")
        tab.run(choose("drill", "dp-grow"))
        assert tab.run(SHOWN) == everything[:1]
        tab.run(choose("drill", ""))
        tab.run(choose("words", "Group.one diverged"))
        assert tab.run(SHOWN) == everything[:1]
        tab.run(choose("words", "nothing of the kind"))
        assert tab.run("!document.getElementById('nothing').hidden")


def test_open_and_close_reach_what_is_shown(pages: Pages) -> None:
    with pages.open("mixed") as tab:
        assert tab.run(OPEN) == ["cell-d-diverged"]
        tab.run("document.querySelector('[name=kind][value=pass]').click()")
        tab.run("document.querySelector('[data-open=yes]').click()")
        assert len(tab.run(OPEN)) == 3
        tab.run("document.querySelector('[data-open=no]').click()")
        assert tab.run(OPEN) == []


@pytest.mark.parametrize("name", ["mixed", "hostile"])
def test_every_anchor_of_the_grid_opens_its_cell(pages: Pages, name: str) -> None:
    with pages.open(name) as tab:
        tab.run("document.querySelectorAll('[name=kind]').forEach((box) => box.click())")
        count = tab.run("document.querySelectorAll('.chip').length")
        assert count
        for number in range(count):
            tab.run(f"document.querySelectorAll('.chip')[{number}].click()")
            state = (
                f"(() => {{ const chip = document.querySelectorAll('.chip')[{number}];"
                "const cell = document.getElementById(decodeURIComponent(chip.hash.slice(1)));"
                "return [cell.open, !cell.hidden, cell.contains(document.activeElement),"
                " Boolean(cell.querySelector('.body'))]; })()"
            )
            assert until(tab, state, all) == [True] * 4


def test_an_anchor_from_outside_opens_its_cell_in_a_packed_page(pages: Pages) -> None:
    with opened(pages.browser, f"{pages.address('thousand')}#cell-cell-0417") as tab:
        inventory = "document.querySelector('#cell-cell-0417[open] .body')?.innerText"
        assert "weights" in until(tab, inventory, bool)
        assert tab.problems == []


def until(tab: Tab, expression: str, wanted: Callable[[Any], bool]) -> Any:
    """The value of an expression once it is as wanted; what it is after a hundred frames else."""
    for _ in range(100):
        value = tab.run(expression)
        if wanted(value):
            break
        tab.run("new Promise(requestAnimationFrame).then(() => 0)")
    return value


def test_the_keyboard_reaches_everything_and_shows_where_it_is(pages: Pages) -> None:
    focused = (
        "(() => { const at = document.activeElement, seen = at.closest('.pick') ?? at;"
        "return [at.name || at.className || at.tagName,"
        " getComputedStyle(seen).outlineStyle !== 'none']; })()"
    )
    with pages.open("mixed") as tab:
        tab.press("Tab", 9)
        assert tab.run(focused) == ["skip", True]
        assert tab.run("document.activeElement.getBoundingClientRect().left >= 0")
        tab.press("Enter", 13)
        assert tab.run("document.activeElement.id") == "cells"
        reached = []
        for _ in range(60):
            tab.press("Tab", 9)
            reached.append(tab.run(focused))
        names = [name for name, _ in reached]
        assert {name for name, visible in reached if not visible} <= {"BODY"}
        for wanted in ("kind", "unexpected", "drill", "words", "SUMMARY", "A"):
            assert wanted in names
        tab.run("document.querySelector('#cell-a-pass summary').focus()")
        tab.press("Enter", 13)
        assert "cell-a-pass" in tab.run(OPEN)
        tab.run("document.querySelector('[name=kind][value=pass]').focus()")
        tab.press(" ", 32)
        assert "cell-a-pass" not in tab.run(SHOWN)


def overlapping(boxes: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Pairs of boxes that cover each other by more than a rounding."""
    return [
        (one, other)
        for number, one in enumerate(boxes)
        for other in boxes[number + 1 :]
        if min(one[1], other[1]) - max(one[0], other[0]) > 1
        and min(one[3], other[3]) - max(one[2], other[2]) > 1
    ]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["mixed", "hostile", "approved", "empty"])
def test_nothing_overlaps_or_sticks_out(pages: Pages, name: str, width: int) -> None:
    structures = []
    for scheme in ("light", "dark"):
        with pages.open(name, width, scheme=scheme) as tab:
            tab.run("document.querySelector('[data-open=yes]')?.click()")
            tab.run(NOTHING_SKIPPED)
            assert tab.run("document.documentElement.scrollWidth") <= width
            assert tab.run(STICKING_OUT) == []
            structures.append(tab.run(BLOCKS))
    for boxes in structures[0]:
        assert overlapping(boxes) == []
    assert structures[0] == structures[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(pages: Pages, scheme: str) -> None:
    with pages.open("mixed", scheme=scheme) as tab:
        tab.run("document.querySelector('[data-open=yes]').click()")
        assert tab.run(CONTRAST) == []
        dark = tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 22)"
        assert dark is (scheme == "dark")


def test_on_paper_every_cell_is_open(pages: Pages) -> None:
    with pages.open("mixed") as tab:
        tab.run("addEventListener('beforeprint', () => { window.opened = " + OPEN + " })")
        printed = tab.pdf()
        assert printed.startswith(b"%PDF")
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) > 2
        assert len(tab.run("window.opened")) == 4
        assert tab.run(OPEN) == ["cell-d-diverged"]


def test_a_thousand_cells_open_at_once(pages: Pages) -> None:
    took_ms = []
    for _ in range(3):
        with pages.open("thousand") as tab:
            assert until(tab, "document.readyState", lambda state: state == "complete")
            took_ms.append(tab.run("performance.getEntriesByType('navigation')[0].loadEventEnd"))
            assert tab.run("document.querySelectorAll('details.cell').length") == 1000
            body = "document.querySelector('#cell-worst[open] .body') !== null"
            assert until(tab, body, bool)
            found = tab.run(
                "(() => { const words = document.querySelector('[name=words]');"
                "words.value = 'cell-0417'; words.dispatchEvent(new Event('input', {bubbles: 1}));"
                f"return {SHOWN}; }})()"
            )
            assert found == ["cell-cell-0417"]
    assert min(took_ms) < 2000
