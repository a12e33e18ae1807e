"""metrics.prom as Prometheus reads it: only what was measured, under the fixed names."""

import re
import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ckptdrill.model import Reason, VerdictWord
from ckptdrill.packet import StoredCell, build, metrics
from tests.packet.conftest import make_plan, make_verdict, stored

SAVED_S = 1_772_424_000.0  # 185 s before the run of `run_json` ended


def cell(
    name: str = "a",
    word: VerdictWord = VerdictWord.PASS,
    reason: Reason = Reason.HELD,
    **save: Any,
) -> StoredCell:
    plan = make_plan(name)
    value = stored(plan, make_verdict(plan, word, reason))
    save = {"call": "save", "step": 8, "duration_s": 1.5, "ended_s": SAVED_S} | save
    value.verdict["numbers"]["save"] = save
    return value


def samples(
    run_json: dict[str, Any], *cells: StoredCell
) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics.render(build(run_json, cells))):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_what_was_measured_has_its_metric(run_json: dict[str, Any]) -> None:
    found = samples(run_json, cell(), cell("b", VerdictWord.UNSUPPORTED, Reason.REFUSED))
    here = {"matrix": "quickstart", "cell": "a"}
    assert found["checkpoint_save_duration_seconds"][0] == (here, 1.5)
    assert found["checkpoint_restore_duration_seconds"][0] == (here, pytest.approx(1.69))
    assert found["checkpoint_restore_failures_total"] == [
        ({"matrix": "quickstart", "reason": "refused"}, 1.0)
    ]
    assert found["resume_loss_delta"][0] == (here, pytest.approx(4e-5, rel=1e-3))
    assert found["resume_world_size_change_total"] == [({"matrix": "quickstart"}, 1.0)]
    assert found["checkpoint_last_committed_step"] == [({"matrix": "quickstart"}, 8.0)]
    assert "checkpoint_async_staging_seconds" not in found


def test_the_age_is_that_of_the_newest_save_that_a_passed_cell_restored(
    run_json: dict[str, Any],
) -> None:
    failed = cell("b", VerdictWord.UNSUPPORTED, Reason.DIVERGED, ended_s=SAVED_S + 60)
    found = samples(run_json, cell(), failed)
    ((_, saved_at),) = found["checkpoint_drill_validated_timestamp_seconds"]
    ((_, age_s),) = found["checkpoint_drill_validated_age_seconds"]
    assert saved_at == SAVED_S
    assert age_s == 185.0


@pytest.mark.parametrize(
    ("about", "made"),
    [
        ({}, cell("a", VerdictWord.UNPROVEN, Reason.NOT_EXERCISED)),
        ({"source_unchanged": False}, cell()),
        ({}, cell(call="async_save")),
        ({}, cell(ended_s=None)),
    ],
)
def test_a_resume_point_that_is_not_proven_has_no_age(
    run_json: dict[str, Any], about: dict[str, Any], made: StoredCell
) -> None:
    found = samples(run_json | about, made)
    assert not [name for name in found if "validated" in name]


def test_an_age_is_never_negative(run_json: dict[str, Any]) -> None:
    found = samples(run_json, cell(ended_s=SAVED_S + 9999))
    assert "checkpoint_drill_validated_age_seconds" not in found


def test_nothing_measured_is_an_empty_exposition(run_json: dict[str, Any]) -> None:
    assert metrics.render(build(run_json, [StoredCell("a")])) == "# EOF\n"


def test_an_asynchronous_save_was_only_staged(run_json: dict[str, Any]) -> None:
    found = samples(run_json, cell(call="async_save"))
    assert found["checkpoint_async_staging_seconds"][0][1] == 1.5
    assert "checkpoint_save_duration_seconds" not in found


@pytest.mark.parametrize(("steps", "samples_again"), [(4, [64.0]), (None, [])])
def test_samples_are_trained_again_only_after_a_fallback(
    run_json: dict[str, Any], steps: int | None, samples_again: list[float]
) -> None:
    made = cell()
    made.verdict["numbers"]["replayed_steps"] = steps
    found = samples(run_json, made).get("checkpoint_reprocessed_samples_total", [])
    assert [value for _, value in found] == samples_again


def test_the_older_text_format_reads_it_too(run_json: dict[str, Any]) -> None:
    """node_exporter's textfile collector reads that one."""
    text = metrics.render(build(run_json | {"matrix": 'a"b\\c\nd'}, [cell()]))
    names = {s.name for f in parser.text_string_to_metric_families(text) for s in f.samples}
    assert {"resume_loss_delta", "resume_world_size_change_total"} <= names


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here: apt-get install prometheus")
def test_promtool_has_nothing_against_it(run_json: dict[str, Any]) -> None:
    """It reads the older format only, in which the help of a counter has its suffix: of that it
    complains, once per counter, and of nothing else (1 would be a text that it cannot parse).
    """
    text = metrics.render(build(run_json | {"matrix": 'a"b\\c\nd'}, [cell()]))
    done = promtool(text)
    counters = sorted(set(re.findall(r"^(\w+_total)\b", text, re.MULTILINE)))
    assert done.stderr.splitlines() + done.stdout.splitlines() == [
        f"{name} no help text" for name in counters
    ]
    assert done.returncode == 3
    assert promtool(text.replace("resume_loss_delta{", "resume loss{")).returncode == 1


def promtool(text: str) -> subprocess.CompletedProcess[str]:
    """What it says about a text of metrics."""
    command = [str(PROMTOOL), "check", "metrics"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)
