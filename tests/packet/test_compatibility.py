"""resume_compatibility.yaml, and the reader's side of it, which says no whenever it is not sure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from ckptdrill.model import Item, Reason, VerdictWord
from ckptdrill.packet import StoredCell, build, compatibility
from ckptdrill.packet.compatibility import decide
from tests.packet.conftest import make_plan, make_verdict, stored

Passing = Callable[[str], StoredCell]


def text(run_json: dict[str, Any], *cells: StoredCell, **about: Any) -> str:
    return compatibility.render(build(run_json | about, cells))


def failing(name: str, **plan: Any) -> StoredCell:
    made = make_plan(name, **plan)
    verdict = make_verdict(
        made, VerdictWord.UNSUPPORTED, Reason.DIVERGED, blame=Item.WEIGHTS, subject="w"
    )
    return stored(made, verdict)


def test_a_passed_route_is_verified_with_its_versions(
    run_json: dict[str, Any], passing: Passing
) -> None:
    (entry,) = yaml.safe_load(text(run_json, passing("a")))["resume_compatibility"]
    assert entry["status"] == "verified"
    assert (entry["from"]["short"], entry["to"]["short"]) == ("fsdp4", "fsdp2")
    assert entry["to"]["torch"] == "2.13.0"
    assert entry["cells"] == {"a": "Pass (held)"}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp4", "fsdp2"),
        ("dp_shard=4", "dp_shard=2"),
        ("dp=4", "dp=2, torch=2.13.0"),
        ("name=fsdp4", "short=fsdp2,world_size=2"),
    ],
)
def test_a_verified_route_is_allowed(
    run_json: dict[str, Any], passing: Passing, source: str, target: str
) -> None:
    assert decide(text(run_json, passing("a")), source, target).allowed


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp2", "fsdp4"),
        ("fsdp4", "fsdp3"),
        ("", "fsdp2"),
        ("dp_shard=4", "dp_shard=2,tp=2"),
        ("dp_replicate=4", "dp_shard=2"),
        ("dp_shard=4", "dp_shard=2,torch=2.12.0"),
        ("dp_shard=4", "dp_shard=2,torch="),
        ("dp_shard=4", "dp_shard=2,tensor=1"),
        ("world_size=4", "world_size=2"),
        ("torch=2.13.0", "torch=2.13.0"),
    ],
)
def test_whatever_is_not_that_route_is_blocked(
    run_json: dict[str, Any], passing: Passing, source: str, target: str
) -> None:
    assert not decide(text(run_json, passing("a")), source, target).allowed


def test_one_failed_cell_blocks_its_route(run_json: dict[str, Any], passing: Passing) -> None:
    decision = decide(text(run_json, passing("a"), failing("b")), "fsdp4", "fsdp2")
    assert not decision.allowed
    assert "blocked_until_drill_passes: a Pass (held); b Unsupported (diverged)" in decision.why


def test_a_failed_damage_drill_does_not_block_a_route(
    run_json: dict[str, Any], passing: Passing
) -> None:
    damaged = failing("b", damaged=True)
    assert decide(text(run_json, passing("a"), damaged), "fsdp4", "fsdp2").allowed


def converted(cell: StoredCell) -> StoredCell:
    """The same cell, restored from what a conversion made."""
    plan = {**cell.plan, "cell": {**cell.plan["cell"], "conversion": "universal"}}
    return replace(cell, plan=plan)


def test_what_a_conversion_needs_is_not_allowed_without_it(
    run_json: dict[str, Any], passing: Passing
) -> None:
    """The same route natively was not drilled, or failed: neither is what was verified."""
    asked = "name=fsdp2,conversion=universal"
    for native in ((), (failing("a"),)):
        written = text(run_json, *native, converted(passing("b")))
        assert decide(written, "fsdp4", asked).allowed
        for target in ("fsdp2", "dp=2", "name=fsdp2", "name=fsdp2,conversion=other"):
            assert not decide(written, "fsdp4", target).allowed


def test_a_failed_conversion_does_not_block_the_native_route(
    run_json: dict[str, Any], passing: Passing
) -> None:
    written = text(run_json, passing("a"), converted(failing("b")))
    assert decide(written, "fsdp4", "fsdp2").allowed
    assert not decide(written, "fsdp4", "name=fsdp2,conversion=universal").allowed


@pytest.mark.parametrize("unchanged", [False, None])
def test_a_source_that_changed_verifies_nothing(
    run_json: dict[str, Any], passing: Passing, unchanged: bool | None
) -> None:
    written = text(run_json, passing("a"), source_unchanged=unchanged)
    assert not decide(written, "fsdp4", "fsdp2").allowed


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"resume_compatibility: [",
        b"resume_compatibility: 1",
        b"resume_compatibility: [{}]",
        b"resume_compatibility: [[]]",
        b"resume_compatibility: []",
        b"- resume_compatibility",
        b"[" * 10_000,
    ],
)
def test_a_file_that_cannot_be_used_is_a_no(content: bytes) -> None:
    assert not decide(content, "fsdp4", "fsdp2").allowed


def test_a_torn_file_never_allows_more_than_the_whole(
    run_json: dict[str, Any], passing: Passing
) -> None:
    whole = text(run_json, passing("a"), failing("b"))
    allowed = [decide(whole[:n], "fsdp4", "fsdp2").allowed for n in range(0, len(whole), 7)]
    assert not any(allowed)
