"""Thousands of mutated checkpoints, and the proof that the fuzzer would see what it looks for."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ckptdrill.errors import UserError

fuzz_formats = pytest.importorskip("tests.fuzz.fuzz_formats")
mutate = pytest.importorskip("tests.fuzz.mutate")
pytest.importorskip("torch")


def fuzz(repository: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "tests/fuzz/fuzz_formats.py", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cases", [2_000, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_mutated_checkpoints_do_no_harm(cases: int, repository: Path) -> None:
    done = fuzz(repository, "--cases", str(cases), "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{cases} cases, seed 1: 0 failures" in done.stdout


WATCHED = """
import sys, os, signal, resource
sys.path.insert(0, ".")
from pathlib import Path
from tests.fuzz import fuzz_formats as f
signal.signal(signal.SIGPROF, f._ring)
root = Path(sys.argv[1])
watch = f.Watch((str(root) + "/",))
case = f.Case(root / "case.pt", None)
counts = {"results": 0, "refusals": 0, "slowest_s": 0.0}
exec("def bad(case):\\n " + sys.argv[2])
print(f._one(bad, case, watch, counts))
"""


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("os.system('true')", "os.system"),
        ("open('/etc/passwd').close()", "open /etc/passwd"),
        ("open(case.path.parent / 'x', 'w').close()", "open"),
        ("import wave", "import"),
        ("raise ValueError('crash')", "ValueError: crash"),
        ("raise RecursionError", "RecursionError"),
        ("while True: pass", "over 2.0 s"),
        ("None", "None"),
    ],
)
def test_the_watch_sees_what_no_reader_may_do(
    what: str, seen: str, repository: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path), what],
        cwd=repository, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert seen in done.stdout


@pytest.mark.parametrize("kind", [mutate._Opens, mutate._Runs])
def test_the_hostile_pickles_really_create_the_file(kind: type, tmp_path: Path) -> None:
    proof = tmp_path / mutate.PROOF
    opened = pickle.loads(pickle.dumps(kind(str(proof))))  # noqa: S301 - that is the proof
    if hasattr(opened, "close"):
        opened.close()
    assert proof.exists()


def test_a_refusal_is_no_failure(tmp_path: Path) -> None:
    def refuse(case: object) -> None:
        raise UserError("no")

    counts = {"results": 0, "refusals": 0, "slowest_s": 0.0}
    watch = fuzz_formats.Watch((f"{tmp_path}{os.sep}",))
    case = fuzz_formats.Case(tmp_path / "case.pt", None)
    assert fuzz_formats._one(refuse, case, watch, counts) is None
    assert counts["refusals"] == 1
