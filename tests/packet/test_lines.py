"""The cited lines: which are shown, what of each, and that nothing in them reaches the page raw."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from ckptdrill.model import Item, to_json
from ckptdrill.packet import StoredCell, build, html, lines, read, write
from ckptdrill.packet.lines import CitedLine
from ckptdrill.store import RunFolder
from tests.packet.conftest import make_plan, make_verdict

StoreRun = Callable[..., RunFolder]
REF = "launches/restore-a-pass/rank0.jsonl:12"


def fact(**data: Any) -> str:
    head = {"fact": "load_end", "t": 1.5, "rank": 0, "step": 3}
    return json.dumps({**head, **data}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("head", "shown"),
    [
        (fact(took_s=0.18, call="load"), CitedLine("load_end", 3, '"took_s":0.18,"call":"load"')),
        (fact(), CitedLine("load_end", 3, "")),
        (fact(digest="0123456789abcdef" * 2), CitedLine("load_end", 3, '"digest":"01234567…"')),
        (
            fact(text="y" * 5000)[: lines.HEAD_BYTES],
            CitedLine("load_end", 3, '"text":"' + "y" * 72),
        ),
        (fact(lr=0.00299993456789), CitedLine("load_end", 3, '"lr":0.00299993456789')),
        (fact(path="/a/b/c/step-8"), CitedLine("load_end", 3, '"path":"…/c/step-8"')),
        ("{}", None),
        ('{"fact":"load_end","t":1', None),
        ("no fact at all", None),
    ],
)
def test_a_line_is_told_by_kind_step_and_beginning(head: str, shown: CitedLine | None) -> None:
    found = lines.line(head)
    if found is not None and found.begins.endswith("yyy…"):
        found = dataclasses.replace(found, begins=found.begins[:-1])
    assert found == shown


def test_what_decided_comes_first_then_the_rows_that_do_not_hold() -> None:
    verdict = to_json(make_verdict(make_plan("a"), blame=Item.LOSS, subject="loss"))
    for number, row in enumerate(verdict["checks"]):
        row["facts"] = [f"launches/x/rank0.jsonl:{number}"]
    verdict["facts"] = ["launches/x/rank1.jsonl:7", "damages/d.json", "launches/x/rank1.jsonl:7"]
    places = [lines.place(ref) for ref in lines.cited(verdict)]
    broken = next(n for n, row in enumerate(verdict["checks"]) if row["status"] == "broken")
    assert places[:3] == [
        ("launches/x/rank1.jsonl", 7),
        ("launches/x/rank0.jsonl", broken),
        ("launches/x/rank0.jsonl", 0),
    ]
    assert len(places) == 6


@pytest.mark.parametrize(
    "verdict", [None, [], {}, {"facts": "x", "checks": [7, {"facts": 7}]}, {"facts": ["/etc/x:1"]}]
)
def test_what_is_no_verdict_cites_nothing(verdict: Any) -> None:
    assert lines.cited(verdict) == ()


def test_the_page_shows_the_line_that_is_cited(
    store_run: StoreRun, all_three: list[StoredCell]
) -> None:
    run = store_run(all_three)
    folder = run.launch("restore-a-pass")
    folder.mkdir(parents=True)
    text = [fact(number=n, note="<script>alert(1)</script>\u202e") for n in range(1, 20)]
    (folder / "rank0.jsonl").write_text("\n".join(text) + "\n")
    secret = run.root.parent / "secret"
    secret.write_text("\n".join(fact(secret=n) for n in range(20)))
    (folder / "rank1.jsonl").symlink_to(secret)
    (cell,) = (cell for cell in read(run).cells if cell.id == "a-pass")
    assert [(shown.ref, line.step) for shown, line in cell.lines] == [(REF, 3)]
    write(run)
    page = (run.root / "index.html").read_text()
    assert "&#34;number&#34;:12,&#34;note&#34;:&#34;&lt;script&gt;alert" in page
    assert "alert(1)</script>" not in page
    assert "secret" not in page


def test_a_long_page_shows_the_lines_of_what_did_not_pass(
    run_json: dict[str, Any], all_three: list[StoredCell]
) -> None:
    cells = [
        dataclasses.replace(cell, id=f"{cell.id}-{n}", lines={REF: fact(of=cell.id)})
        for n in range(26)
        for cell in all_three
    ]
    short, long = (html.render(build(run_json, some)) for some in (cells[:8], cells))
    assert short.count("Cited lines") == 8
    assert long.count("Cited lines") == html.WORST_CELLS
