"""Drop every statement of the reference job's restore code in turn: is each one missed?

Each mutant is the whole job without one statement; it is drilled at 2 -> 2 and 2 -> 4 ranks through
the real command line. A mutant must end loudly (the job stops) or be caught (Unsupported, with the
item to blame); one that passes is a hole, unless `EXPLAINED` says why the statement cannot matter.

    python tests/corpus/mutations.py [--jobs N] [--keep FOLDER]

prints one line per mutant and the score, and exits 1 when a mutant passes unexplained.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

JOB = Path(__file__).parents[2] / "drills" / "jobs" / "torch_dcp.py"
FUNCTIONS = ("restore", "set_random_state")

# Statements whose absence changes nothing in these drills, and why.
EXPLAINED = {
    'print(f"rank {RANK}: no random state': "a line of output",
    "seed_rank(seed + 1000": "ranks without a record: the matrix declares their random state "
    "not guaranteed",
    'torch.cuda.set_rng_state(state["cuda"]': "no CUDA device here: the branch is not taken",
    "set_model_state_dict(run.average": "the load has filled the average's own tensors in place; "
    "copies are handed out by FSDP1 only",
}

MATRIX = """\
version: 1
name: mutant
job:
  program: {program}
  args: [--out, "{{out}}", --save-at, "8,12", --scaler]
  resume_args: [--resume, "{{resume}}"]
  checkpoint: "{{out}}/step-{{step}}"
  saves: [8, 12]
  restore_step: 8
  window: 5
  timeout_s: 240
topologies:
  two: {{dp_shard: 2}}
  four: {{dp_shard: 4}}
policy:
  rng: {{same_world_size: continued, other_world_size: not_guaranteed}}
  out_of_scope: {{precision: "this scaler never overflows"}}
matrix:
  - {{source: two, targets: [two, four]}}
"""


@dataclass(frozen=True)
class Mutant:
    """The job without one statement."""

    line: int
    dropped: str
    source: str


@dataclass(frozen=True)
class Result:
    """What the drill said of a mutant."""

    mutant: Mutant
    outcome: str  # caught, loud, explained, missed
    detail: str


def mutants() -> Iterator[Mutant]:
    """One mutant per statement of the restore code, in the order of the file."""
    text = JOB.read_text(encoding="utf-8")
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and function.name in FUNCTIONS:
            for statement in _statements(function.body):
                first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
                indent = lines[first][: statement.col_offset]
                changed = [*lines[:first], f"{indent}pass", *lines[last:]]
                dropped = " ".join(line.strip() for line in lines[first:last])
                yield Mutant(statement.lineno, dropped, "\n".join(changed) + "\n")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements; of an `if`, those of both branches, not the whole."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            yield statement


def drill(mutant: Mutant, folder: Path) -> Result:
    """Run the mutant through the command line and read the verdicts."""
    place = folder / f"line{mutant.line}"
    place.mkdir(parents=True)
    (place / "job.py").write_text(mutant.source, encoding="utf-8")
    (place / "mutant.yaml").write_text(MATRIX.format(program=place / "job.py"), encoding="utf-8")
    command = [sys.executable, "-m", "ckptdrill", "run", str(place / "mutant.yaml")]
    done = subprocess.run(
        [*command, "--launcher", "warm", "--runs", str(place / "runs")],
        capture_output=True,
        text=True,
        check=False,
    )
    files = sorted((place / "runs").glob("mutant/latest/cells/*/verdict.json"))
    verdicts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if not verdicts:
        return Result(mutant, "missed", f"no verdict: {done.stderr.strip()[-200:]}")
    return _result(mutant, verdicts)


def _result(mutant: Mutant, verdicts: list[dict[str, str]]) -> Result:
    diverged = [v for v in verdicts if v["reason"] == "diverged"]
    loud = [v for v in verdicts if v["reason"] in {"crashed", "refused", "source-failed"}]
    if diverged:
        return Result(
            mutant, "caught", f"{diverged[0]['blame_item']}: {diverged[0]['explanation']}"
        )
    if loud:
        return Result(mutant, "loud", loud[0]["explanation"])
    why = next((w for start, w in EXPLAINED.items() if mutant.dropped.startswith(start)), None)
    if why is not None:
        return Result(mutant, "explained", why)
    return Result(mutant, "missed", "; ".join(f"{v['word']} {v['reason']}" for v in verdicts))


def main() -> int:
    """Drill all mutants, print the table and the score."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutants side by side")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(lambda m: drill(m, folder), mutants()))
    for result in results:
        shown = f"{result.mutant.line:4d} {result.outcome:<9} {result.mutant.dropped[:60]}"
        print(f"{shown}\n               {result.detail[:160]}")
    counts = {
        o: sum(r.outcome == o for r in results) for o in ("caught", "loud", "explained", "missed")
    }
    print(f"{len(results)} statements dropped: " + ", ".join(f"{n} {o}" for o, n in counts.items()))
    return 1 if counts["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
