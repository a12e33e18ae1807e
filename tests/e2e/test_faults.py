"""Who notices a damaged shard or a pointer that lies: the framework, a manifest, or nobody.

The shipped matrices, narrowed to a few of their kinds. Twins without a fault are their baselines.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import resources

pytestmark = pytest.mark.e2e


def _drilled(folder: Path, name: str, kinds: str, follow: str = "latest") -> dict[str, Any]:
    """Verdicts by cell id of a shipped matrix with only these kinds of fault."""
    matrix = (resources.matrices_dir() / f"{name}.yaml").read_text(encoding="utf-8")
    matrix = re.sub(r"kind: \[[a-z, -]+\]", f"kind: [{kinds}]", matrix, count=1)
    matrix = matrix.replace("version: 1", "version: 1\nrepeats: 0")
    if name == "pointers":  # which are the same whatever the number of ranks
        matrix = matrix.replace("{dp_shard: 2}", "{dp_shard: 1}")
    if follow == "newest":  # then every cell is to pass
        matrix = matrix.replace("--find, latest", "--find, newest").partition("    expect:")[0]
    (folder / "m.yaml").write_text(matrix, encoding="utf-8")
    command = [sys.executable, "-m", "ckptdrill", "run", str(folder / "m.yaml")]
    done = subprocess.run(
        [*command, "--launcher", "warm", "--runs", str(folder / "runs")],
        capture_output=True,
        text=True,
        check=False,
    )
    files = folder.glob("runs/*/latest/cells/*/verdict.json")
    verdicts = {file.parent.name: json.loads(file.read_text()) for file in files}
    assert verdicts, done.stdout + done.stderr
    return verdicts


def _row(verdict: dict[str, Any]) -> str:
    (summary,) = (row["summary"] for row in verdict["checks"] if row["item"] == "damage")
    return str(summary)


def test_a_manifest_notices_what_the_framework_loads(tmp_path: Path) -> None:
    verdicts = _drilled(tmp_path, "faults", "header-flip, swap")
    assert all(verdict["expected"] for verdict in verdicts.values()), verdicts
    loaded = verdicts["two_to_two.corrupt-shard.none.header-flip"]
    assert loaded["reason"] == "diverged"
    assert "the framework loaded it without a word" in _row(loaded)
    assert "a manifest names __0_0.distcp (checksum-differs)" in _row(loaded)
    swapped = verdicts["two_to_two.corrupt-shard.none.swap"]
    assert swapped["reason"] == "refused"
    assert "swapped __0_0.distcp and __1_0.distcp; the framework noticed" in _row(swapped)
    assert "a manifest names both" in _row(swapped)
    for kind in ("header-flip", "swap"):
        guarded = verdicts[f"two_to_two.corrupt-shard.manifest.{kind}"]
        assert (guarded["word"], guarded["reason"]) == ("Pass", "fell-back")
        assert guarded["numbers"]["replayed_steps"] == 2


def test_a_job_that_trusts_its_pointer_begins_again(tmp_path: Path) -> None:
    verdicts = _drilled(tmp_path, "pointers", "missing, stale, removed")
    assert all(verdict["expected"] for verdict in verdicts.values()), verdicts
    gone = verdicts["two_to_two.lying-pointer.removed"]
    assert (gone["word"], gone["reason"]) == ("Unsupported", "diverged")
    assert "began again at step 0 without a word, 10 steps are lost" in gone["explanation"]
    assert verdicts["two_to_two.lying-pointer.stale"]["numbers"]["replayed_steps"] == 2


def test_a_job_that_looks_at_what_is_there_is_not_misled(tmp_path: Path) -> None:
    verdicts = _drilled(tmp_path, "pointers", "uncommitted", follow="newest")
    assert {verdict["reason"] for verdict in verdicts.values()} == {"held"}
    assert "was not misled" in _row(verdicts["two_to_two.lying-pointer.uncommitted"])
