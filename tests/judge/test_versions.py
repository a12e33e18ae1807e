"""Writer and reader of a checkpoint, and when a pair of environments is no skew."""

import dataclasses
from typing import Any

from ckptdrill.judge import versions
from ckptdrill.model import Item, Reason, VerdictWord
from tests.judge.history import History, healthy


def skewed(**reader: str) -> History:
    """The same layout in two environments; `reader` are versions that the restore imported."""
    history = healthy()
    plan = history.evidence.plan
    restore = dataclasses.replace(plan.restore, id="restore.skew", environment="new")
    records: dict[str, Any] = dict(history.evidence.records)
    records[restore.id] = records[plan.restore.id]
    history = history.given(plan=dataclasses.replace(plan, restore=restore), records=records)
    for launch, packages in (("source", {"packing": "1.0"}), ("restore", reader)):
        fact = history.fact("imported", launch=launch, packages=packages)
        history = history.adding(fact, launch=launch)
    return history


def test_versions_that_differ_are_named_on_both_sides() -> None:
    verdict = skewed(packing="2.0").verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.PASS, Reason.HELD)
    assert "written by packing 1.0, read by packing 2.0" in verdict.explanation


def test_equal_versions_in_another_environment_prove_nothing() -> None:
    verdict = skewed(packing="1.0").verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.FAULT_NOT_FIRED)
    assert verdict.blame_item is Item.CONFIGURATION


def test_what_only_one_side_imports_is_no_difference() -> None:
    assert skewed(other="7").verdict().reason is Reason.FAULT_NOT_FIRED


def test_another_torch_is_a_difference_without_any_package() -> None:
    history = skewed().edited("started", lambda data: data.update(torch="2.14.0"))
    verdict = history.verdict()
    assert verdict.reason is Reason.HELD
    assert "written by torch 2.13.0, read by torch 2.14.0" in verdict.explanation


def test_a_refusal_names_the_versions_too() -> None:
    verdict = skewed(packing="2.0").refused(0).verdict()
    assert verdict.reason is Reason.REFUSED
    assert "in load: ValueError: shapes do not match (written by packing" in verdict.explanation


def test_within_one_environment_nothing_is_said_of_versions() -> None:
    verdict = healthy().verdict()
    assert "written by" not in verdict.explanation
    record = healthy().record("source")
    assert versions.skew(record, record).differing == ()
