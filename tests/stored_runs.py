"""Run folders as a run leaves them, by hand: what earlier nights found, in a line each."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckptdrill import store
from ckptdrill.model import Claim, Reason, VerdictWord
from ckptdrill.reasons import EXPLANATIONS

NIGHT_S = 86_400.0
FIRST_S = datetime(2026, 3, 1, 2, tzinfo=UTC).timestamp()
TORCH = "2.13.0"


def utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


def name_of(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def night(
    folder: Path,
    number: int,
    cells: Mapping[str, Reason],
    *,
    torch: str = TORCH,
    name: str | None = None,
    save: Mapping[str, Any] | None = None,
    **about: Any,
) -> Path:
    """The run of night `number`, an hour long; its cells saved step 8 in the middle of it."""
    began_s = FIRST_S + number * NIGHT_S
    root = folder / (name or name_of(began_s))
    content = {
        "matrix": "quick",
        "status": "judged",
        "started_utc": utc(began_s),
        "ended_utc": utc(began_s + 3600),
        "nightly": True,
        "source_unchanged": True,
        "environments": {"default": {"torch": torch, "python": "3.11.7", "cuda": None}},
        "versions": {"ckptdrill": "0.1.0"},
    }
    write_run(root, {**content, **about})
    saved = {"call": "save", "step": 8, "ended_s": began_s + 1800, **(save or {})}
    for cell, reason in cells.items():
        write_cell(root, cell, reason, saved)
    return root


def write_run(root: Path, about: Mapping[str, Any]) -> None:
    store.write_json(root / "run.json", about)
    store.write_atomic(root / "matrix.yaml", "version: 1\n")
    (root / "cells").mkdir()


def write_cell(root: Path, cell: str, reason: Reason, save: Mapping[str, Any]) -> None:
    word = EXPLANATIONS[reason].word
    store.write_json(root / "cells" / cell / "plan.json", {"cell": cell})
    verdict = {
        "word": word.value,
        "reason": reason.value,
        "claim": Claim.CONTINUES.value,
        "expected": word is VerdictWord.PASS,
        "blame_item": "weights" if reason is Reason.DIVERGED else None,
        "blame_subject": "layers.0.weight" if reason is Reason.DIVERGED else None,
        "explanation": f"it {reason.value}",
        "numbers": {"save": dict(save)},
    }
    store.write_json(root / "cells" / cell / "verdict.json", verdict)
