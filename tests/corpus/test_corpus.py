"""Every script of the corpus is drilled as a user would drill it, and gets the verdict it deserves.

One test per case: `run.py` starts the command line on real processes, and a test fails with the
first cell whose verdict, reason or blame is not the true one. The truths themselves are tested in
the fast run: every case is a valid matrix, and no script is without a case.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from ckptdrill import matrix as matrices
from ckptdrill.model import Item, Reason, VerdictWord

CORPUS = Path(__file__).resolve().parent
NOT_CASES = {
    *("bench.py", "elsewhere.py", "healthy.py", "mutations.py", "rounding.py", "run.py"),
    "test_corpus.py",
}


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("corpus_run", CORPUS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


RUNNER = _runner()
ALL_CASES = RUNNER.load_cases()
RECIPES = (1, 3, 9, 11, 13, 14, 15, 16, 20, 22, 26, 27, 29, 30, 32, 33, 34, 35, 37, 39, 41)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.mark.corpus
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id)
def test_case_gets_the_verdict_it_deserves(case: RUNNER.Case, runs: Path) -> None:
    if case.missing:
        pytest.skip(f"not run: {case.missing} is not installed")
    for result in RUNNER.run_case(case, runs):
        where = f"{result.cell['source']} -> {result.cell['target']}, see {runs / case.id}"
        assert result.score in RUNNER.GOOD, (
            f"{result.score}: {result.said} ({where}): {result.note}"
        )
        assert result.note == "", f"{result.said} ({where})"


def test_every_recipe_and_control_has_a_case() -> None:
    names = {case.id.split("-")[0] for case in ALL_CASES}
    assert {f"o{number:02d}" for number in RECIPES} <= names
    assert {f"c{number}" for number in range(1, 10)} <= names


def test_no_script_is_without_a_case() -> None:
    scripts = {path.name for path in CORPUS.glob("*.py")} - NOT_CASES
    assert scripts == {case.script for case in ALL_CASES if "/" not in case.script}


def test_scripts_know_nothing_of_the_drill() -> None:
    knowing = [path.name for path in CORPUS.glob("*.py") if path.name not in NOT_CASES]
    assert [name for name in knowing if "ckptdrill" in (CORPUS / name).read_text("utf-8")] == []


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id)
def test_truths_use_the_words_of_the_judge(case: RUNNER.Case) -> None:
    items = {item.value for item in Item}
    for cell in case.cells:
        truth = cell["expect"]
        named = truth.get("item", [])
        assert VerdictWord(truth["verdict"])
        assert "reason" not in truth or Reason(truth["reason"])
        assert {named} <= items if isinstance(named, str) else set(named) <= items
        assert set(truth.get("rows", {})) <= items
        assert set(truth) <= {
            "verdict",
            "reason",
            "item",
            "subject",
            "mentions",
            "untrue",
            "rows",
            "why",
        }


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id)
def test_case_is_a_valid_matrix(case: RUNNER.Case, tmp_path: Path) -> None:
    path = tmp_path / f"{case.id}.yaml"
    path.write_text(yaml.safe_dump(RUNNER.matrix_of(case), sort_keys=False), encoding="utf-8")
    assert matrices.load(path).job.restore_step in case.job["saves"]


PASSING = {"word": "Pass", "reason": "held", "blame_item": None, "blame_subject": None}
ALARM = {
    "word": "Unsupported",
    "reason": "diverged",
    "blame_item": "weights",
    "blame_subject": "mid.weight",
}


def _score(truth: dict[str, object], **verdict: object) -> tuple[object, str]:
    whole = {"explanation": "mid.weight differs", "checks": [], **verdict}
    score, _, note = RUNNER._scored(truth, whole, "")
    return score, note


def test_score_tells_what_was_caught_missed_and_wrongly_accused() -> None:
    bug = {"verdict": "Unsupported", "reason": "diverged", "item": "weights", "subject": "mid."}
    score = RUNNER.Score
    assert _score(bug, **ALARM) == (score.RIGHT, "")
    assert _score({**bug, "item": "buffers"}, **ALARM)[0] is score.WRONG_BLAME
    assert _score({**bug, "subject": "out."}, **ALARM)[0] is score.WRONG_BLAME
    assert _score(bug, **PASSING)[0] is score.MISSED
    assert _score({"verdict": "Pass"}, **ALARM)[0] is score.FALSE_ALARM
    assert _score({"verdict": "Pass"}, **PASSING) == (score.HEALTHY, "")
    assert _score({"verdict": "Unproven"}, **PASSING)[0] is score.MISSED
    assert _score({"verdict": "Unproven"}, **ALARM)[0] is score.FALSE_ALARM


def test_words_that_the_verdict_does_not_say_are_noted() -> None:
    truth = {"verdict": "Unsupported", "mentions": ["mid.weight", "step 10"]}
    assert _score(truth, **ALARM) == (RUNNER.Score.RIGHT, "does not say: step 10")


def test_every_case_id_and_every_script_of_a_mistake_is_told_once() -> None:
    titles = Counter(case.title for case in ALL_CASES)
    assert [title for title, count in titles.items() if count > 1] == []
