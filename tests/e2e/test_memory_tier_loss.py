"""The reference job with two tiers loses its memory in three ways, and its disk is full for a
while; a job whose ranks do not agree on the step they take trains on a mixture, and is found.
"""

from pathlib import Path
from typing import Any

import pytest

from ckptdrill import matrix, tiers
from ckptdrill.store import RunFolder

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "matrices/two_tiers.yaml"


def test_the_reference_job_recovers_from_every_loss(bench: Any) -> None:
    result = bench.drill(SHIPPED)
    assert result.code == 0, result.out + result.err
    for loss in ("all", "one-rank", "stale"):
        verdict = result.verdicts[f"two_to_two.memory-tier-loss.{loss}"]
        assert (verdict["word"], verdict["reason"]) == ("Pass", "fell-back"), verdict["explanation"]
        numbers = verdict["numbers"]["tiers"]
        assert (numbers["memory"]["step"], numbers["memory"]["steps_lost"]) == (14, 0)
        assert (numbers["after_loss"]["step"], numbers["after_loss"]["steps_lost"]) == (12, 2)
        assert 0 < numbers["memory"]["load_to_first_step_s"] < numbers["memory"]["recovery_s"]
    stall = result.verdicts["two_to_two.storage-stall.enospc"]
    assert (stall["word"], stall["reason"]) == ("Pass", "fell-back"), stall["explanation"]
    assert stall["numbers"]["storage"]["restored_step"] == 9
    declared = matrix.load(SHIPPED).job.memory_tier
    assert declared is not None
    assert not tiers.root(declared, RunFolder(result.root)).exists()  # the memory is given back


def test_ranks_that_do_not_agree_are_found(bench: Any) -> None:
    text = (ROOT / "drills/jobs/two_tiers.py").read_text()
    alone = text.replace("set.intersection(*everyones)", "mine")
    assert alone != text
    (bench.folder / "alone.py").write_text(alone)
    form = SHIPPED.read_text().replace("name: two_tiers", "name: alone\nrepeats: 0")
    form = form.replace('"{jobs}/two_tiers.py"', "alone.py")
    form = form.replace("[all, one-rank, stale]", "one-rank").partition("      - storage-stall")[0]
    (bench.folder / "alone.yaml").write_text(form)
    verdicts = bench.drill(bench.folder / "alone.yaml").verdicts
    verdict = verdicts["two_to_two.memory-tier-loss.one-rank"]
    assert (verdict["word"], verdict["reason"]) == ("Unsupported", "diverged")
    assert "the memory tier of rank 1 was lost" in verdict["explanation"]
