"""Drill every script of the corpus through the real command line, and score the verdicts.

`cases.yaml` says of each cell what is true of it. A case becomes one matrix; one `ckptdrill run`
restores it on real processes, warm, two cases side by side; each stored verdict is then put beside
the truth. A mistake can be caught with the right blame, caught with the wrong blame, or missed; a
healthy job can pass, or be accused.

    python tests/corpus/run.py [--runs FOLDER] [--jobs N] [CASE …]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

CORPUS = Path(__file__).resolve().parent
CASES = CORPUS / "cases.yaml"
TIMEOUT_S = 600.0


class Score(StrEnum):
    """How a verdict compares with the truth."""

    RIGHT = "caught with the right blame"
    WRONG_BLAME = "caught with the wrong blame"
    MISSED = "missed"
    FALSE_ALARM = "false alarms"
    HEALTHY = "healthy and passed"
    OPEN = "rightly unproven"
    NOT_RUN = "not run"


GOOD = {Score.RIGHT, Score.HEALTHY, Score.OPEN}


@dataclass(frozen=True)
class Case:
    """One script, one matrix, and the truth of each of its cells."""

    id: str
    title: str
    script: str
    link: str
    job: Mapping[str, Any]
    rest: Mapping[str, Any]  # other sections of the matrix: policy, tolerance, repeats
    topologies: Mapping[str, Any]
    cells: tuple[Mapping[str, Any], ...]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> str | None:
        """The first module that the script needs and this interpreter has not."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), None)


@dataclass(frozen=True)
class Result:
    """One cell: the truth, what the tool said, how they compare."""

    case: Case
    cell: Mapping[str, Any]
    score: Score
    said: str
    note: str = ""  # what of the truth the verdict does not tell


def load_cases(path: Path = CASES) -> list[Case]:
    """The cases in the order of the file."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    defaults = document["defaults"]
    return [
        Case(
            id=name,
            title=entry["title"],
            script=entry["script"],
            link=entry.get("link", ""),
            job={**defaults["job"], **entry.get("job", {})},
            rest=entry.get("matrix", {}),
            topologies=_used(defaults["topologies"], entry["cells"]),
            cells=tuple(entry["cells"]),
            needs=tuple(entry.get("needs", ())),
        )
        for name, entry in document["cases"].items()
    ]


def matrix_of(case: Case) -> dict[str, Any]:
    """The matrix file of a case, as plain data."""
    return {
        "version": 1,
        "name": case.id,
        "job": {"program": str((CORPUS / case.script).resolve()), **case.job},
        "topologies": dict(case.topologies),
        "repeats": 0,
        **case.rest,
        "matrix": [_entry(cell) for cell in case.cells],
    }


def _used(topologies: Mapping[str, Any], cells: list[dict[str, Any]]) -> dict[str, Any]:
    named = {name for cell in cells for name in (cell["source"], cell["target"])}
    return {name: topologies[name] for name in sorted(named)}


def _entry(cell: Mapping[str, Any]) -> dict[str, Any]:
    entry = {key: cell[key] for key in ("source", "target", "drill") if key in cell}
    expected = {key: cell["expect"][key] for key in ("verdict", "reason") if key in cell["expect"]}
    return {**entry, "expect": expected}


def run_case(case: Case, runs: Path, timeout_s: float = TIMEOUT_S) -> list[Result]:
    """Drill one case; its run folder is below `runs`."""
    if case.missing:
        why = f"{case.missing} is not installed"
        return [Result(case, cell, Score.NOT_RUN, why) for cell in case.cells]
    matrix = runs / "matrices" / f"{case.id}.yaml"
    matrix.parent.mkdir(parents=True, exist_ok=True)
    matrix.write_text(yaml.safe_dump(matrix_of(case), sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "ckptdrill", "run", str(matrix), "--python", sys.executable]
    try:
        done = subprocess.run(
            [*command, "--runs", str(runs), "--launcher", "warm"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        said = f"ckptdrill did not end within {timeout_s:.0f} s"
        return [Result(case, cell, Score.NOT_RUN, said) for cell in case.cells]
    (runs / "matrices" / f"{case.id}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    verdicts = _verdicts(runs / case.id / "latest") if done.returncode in (0, 1, 3) else []
    return [_result(case, cell, verdicts, done) for cell in case.cells]


def _verdicts(run: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    folders = sorted((run / "cells").iterdir())
    return [tuple(_read(f / name) for name in ("plan.json", "verdict.json")) for f in folders]  # type: ignore[misc]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _result(
    case: Case,
    cell: Mapping[str, Any],
    verdicts: list[tuple[dict[str, Any], dict[str, Any]]],
    done: subprocess.CompletedProcess[str],
) -> Result:
    found = [verdict for plan, verdict in verdicts if _is_cell(plan["cell"], cell)]
    if not found:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        return Result(case, cell, Score.NOT_RUN, " ".join(last)[:300])
    verdict = found[0]
    said = f"{verdict['word']} {verdict['reason']}"
    if verdict["blame_item"]:
        said += f" [{verdict['blame_item']}: {verdict['blame_subject'] or '-'}]"
    return Result(case, cell, *_scored(cell["expect"], verdict, said))


def _is_cell(planned: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
    drill = cell.get("drill")
    parameters = next(iter(drill.values())) if isinstance(drill, dict) else {}
    named = next(iter(drill)) if isinstance(drill, dict) else drill
    return (
        planned["source"]["name"] == cell["source"]
        and planned["target"]["name"] == cell["target"]
        and (named is None or planned["drill"] == named)
        and planned["parameters"] == parameters
    )


def _scored(
    truth: Mapping[str, Any], verdict: Mapping[str, Any], said: str
) -> tuple[Score, str, str]:
    """The score of one verdict, what was said, and what of the truth it does not tell."""
    word, wanted = verdict["word"], truth["verdict"]
    wrong = _misjudged(truth, verdict)
    note = wrong or _untold(truth, verdict)
    if word != wanted:
        return _wrong_word(wanted, word), said, note
    if wanted == "Pass":
        return (Score.HEALTHY if not wrong else Score.MISSED), said, note
    if wrong:
        return Score.WRONG_BLAME, said, note
    return (Score.RIGHT if wanted == "Unsupported" else Score.OPEN), said, note


def _wrong_word(wanted: str, word: str) -> Score:
    """Nothing passes without being shown healthy, and nothing is accused without proof."""
    if wanted == "Pass" or (wanted == "Unproven" and word == "Unsupported"):
        return Score.FALSE_ALARM
    return Score.MISSED


def _misjudged(truth: Mapping[str, Any], verdict: Mapping[str, Any]) -> str:
    """Which of reason, item, subject or row is not the true one; empty when all are."""
    if truth.get("reason") not in (None, verdict["reason"]):
        return f"the reason is {truth['reason']}"
    items = truth.get("item")
    items = [items] if isinstance(items, str) else items
    if items and verdict["blame_item"] not in items:
        return f"the item is {' or '.join(items)}"
    if truth.get("subject", "") not in (verdict["blame_subject"] or ""):
        return f"the subject is {truth['subject']}"
    rows = {check["item"]: check["status"] for check in verdict["checks"]}
    for item, status in truth.get("rows", {}).items():
        if rows.get(item) != status:
            return f"the row {item!r} is {rows.get(item)!r}, not {status!r}"
    return ""


def _untold(truth: Mapping[str, Any], verdict: Mapping[str, Any]) -> str:
    """Words that a person needs and that neither the explanation nor the blamed row has, and words
    that they have and that are not true.
    """
    rows = [c for c in verdict["checks"] if c["item"] == verdict["blame_item"]]
    told = json.dumps([verdict["explanation"], verdict["blame_subject"], rows]).lower()
    absent = [word for word in truth.get("mentions", ()) if word.lower() not in told]
    untrue = [word for word in truth.get("untrue", ()) if word.lower() in told]
    notes = [("does not say", absent), ("says, and it is not so", untrue)]
    return "; ".join(f"{note}: {', '.join(words)}" for note, words in notes if words)


def _report(results: list[Result], took_s: float) -> None:
    for result in results:
        good = result.score in GOOD
        if good and not result.note:
            continue
        cell = f"{result.case.id} {result.cell['source']}->{result.cell['target']}"
        print(f"{'unexplained' if good else result.score}: {cell}: {result.case.title}")
        print(f"    said:  {result.said}")
        wanted = {key: value for key, value in result.cell["expect"].items() if key != "why"}
        print(f"    truth: {wanted}")
        if result.note:
            print(f"    lacks: {result.note}")
    counts = Counter(result.score for result in results)
    print()
    for score in Score:
        print(f"{counts[score]:4d}  {score}")
    for result in results:
        if result.score is Score.NOT_RUN:
            print(f"not run: {result.case.id}: {result.said}")
    print(f"{len(results)} cells of {len({r.case.id for r in results})} cases in {took_s:.0f} s")


def main() -> int:
    """0 when every cell that ran came out as it is."""
    parser = argparse.ArgumentParser(description="Score ckptdrill on the corpus.")
    parser.add_argument("--runs", type=Path, default=Path("runs/corpus"))
    parser.add_argument("--jobs", type=int, default=2, help="cases side by side")
    parser.add_argument("cases", nargs="*", help="ids, or beginnings of ids; default: all")
    args = parser.parse_args()
    cases = [c for c in load_cases() if not args.cases or c.id.startswith(tuple(args.cases))]
    began = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as threads:
        per_case = list(threads.map(lambda case: run_case(case, args.runs.resolve()), cases))
    results = [result for each in per_case for result in each]
    _report(results, time.monotonic() - began)
    failed = any(r.score not in {*GOOD, Score.NOT_RUN} for r in results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
