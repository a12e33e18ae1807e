"""Manifests of a cell: of what was restored, of what was saved next; other shapes are left out."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from ckptdrill.packet import StoredCell, build


def described(step: int, shapes: str = "5" * 64) -> dict[str, Any]:
    """An entry of manifests.json as `read` hands it over."""
    record = {
        "format": "dcp",
        "commit_marker": {"file": ".metadata"},
        "files": [{"path": "a", "bytes": 7}, {"path": "b", "bytes": 5}],
        "state_keys_sha256": "4" * 64,
        "shapes_sha256": shapes,
        "checkpoint_id": "sha256:ab",
    }
    path = f"launches/x/step-{step}.manifest.json"
    return {"step": step, "file": "f", "refused": None, "path": path, "record": record}


def test_manifests_are_of_what_is_restored_and_of_the_save_after_it(
    run_json: dict[str, Any], passing: Callable[[str], StoredCell]
) -> None:
    begun = {
        "source-fsdp4": {"manifests": [described(4), described(8)]},
        "restore-a": {"manifests": [described(12)]},
    }
    stored_cell = dataclasses.replace(passing("a"), launches=begun)
    found = build(run_json, [stored_cell]).cells[0].manifests
    assert [(each.of, each.step) for each in found] == [("source", 8), ("after the restore", 12)]
    assert (found[0].files, found[0].size_bytes, found[0].marker) == (2, 12, ".metadata")


@pytest.mark.parametrize(
    "entries", [None, "x", [None], [{}], [{"step": "x"}], [{"step": 8, "record": {}, "path": 1}]]
)
def test_manifests_of_another_shape_are_left_out(
    run_json: dict[str, Any], passing: Callable[[str], StoredCell], entries: Any
) -> None:
    begun = {"source-fsdp4": {"manifests": entries}, "restore-a": {"manifests": [described(12)]}}
    stored_cell = dataclasses.replace(passing("a"), launches=begun)
    found = build(run_json, [stored_cell]).cells[0].manifests
    assert [each.step for each in found] == [12]


def test_a_checkpoint_without_a_manifest_says_why(
    run_json: dict[str, Any], passing: Callable[[str], StoredCell]
) -> None:
    begun = {"restore-a": {"manifests": [{"step": 12, "file": None, "refused": "torn"}]}}
    stored_cell = dataclasses.replace(passing("a"), launches=begun)
    (found,) = build(run_json, [stored_cell]).cells[0].manifests
    assert (found.refused, found.path) == ("torn", "")


def test_the_manifest_of_a_given_checkpoint_stands_for_that_of_a_source(
    run_json: dict[str, Any], passing: Callable[[str], StoredCell]
) -> None:
    cell = passing("a")
    cell.plan["restore"]["restores"] = None
    given = described(0)["record"] | {"completed_step": 1200}
    (found,) = build(run_json, [cell], given=given).cells[0].manifests
    assert (found.of, found.step, found.path) == ("given", 1200, "source.manifest.json")
