"""Drop every statement of the reference jobs' restore code in turn: is each one missed?

Each mutant is a whole job without one statement; it is drilled onto its own ranks and onto others,
where the job can, through the real command line. A mutant must end loudly (the job stops) or be
caught (Unsupported, with the item to blame); one that passes is a hole, unless its `Reference` says
why the statement cannot matter.

    python tests/corpus/mutations.py [--jobs N] [--keep FOLDER] [JOB …]

prints one line per mutant and the score, and exits 1 when a mutant passes unexplained. Jobs that
need a package which is not here are left out, and named.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

JOBS = Path(__file__).parents[2] / "drills" / "jobs"

MATRIX = """\
version: 1
name: mutant
job:
  program: {program}
  timeout_s: 240
{job}
policy:
  rng: {{same_world_size: continued, other_world_size: not_guaranteed}}
{rest}
"""


@dataclass(frozen=True)
class Reference:
    """A job, where its restore code is, and how it is drilled.

    `functions` are dropped from statement by statement; of `main` only what follows
    `if args.resume:`. `explained` are beginnings of statements whose absence changes nothing in
    this drill, each with the reason. `job` and `rest` are parts of the matrix.
    """

    name: str
    functions: tuple[str, ...]
    explained: Mapping[str, str]
    job: str
    rest: str
    needs: str = "torch"


_ONLY_OUTPUT = "a line of output"
_NO_CUDA = "no CUDA device here: the branch is not taken"
_NEW_RANKS = "ranks without a record: the matrix declares their random state not guaranteed"
_STEPS = """\
  resume_args: [--resume, "{resume}"]
  checkpoint: "{out}/step-{step}"
  saves: [8, 12]
  restore_step: 8
  window: 5"""

REFERENCES = (
    Reference(
        "torch_dcp",
        ("restore", "set_random_state"),
        {
            'print(f"rank {RANK}: no random state': _ONLY_OUTPUT,
            "seed_rank(seed + 1000": _NEW_RANKS,
            'torch.cuda.set_rng_state(state["cuda"]': _NO_CUDA,
            "set_model_state_dict(run.average": "the load has filled the average's own tensors in "
            "place; copies are handed out by FSDP1 only",
        },
        '  args: [--out, "{out}", --save-at, "8,12", --scaler]\n' + _STEPS,
        """\
  out_of_scope: {precision: "this scaler never overflows"}
topologies:
  two: {dp_shard: 2}
  four: {dp_shard: 4}
matrix:
  - {source: two, targets: [two, four]}""",
    ),
    Reference(
        "deepspeed_zero",
        ("restore", "set_random_state"),
        {
            'print(f"rank {RANK}: no random state': _ONLY_OUTPUT,
            "seed_rank(args.seed + 1000": _NEW_RANKS,
            'torch.cuda.set_rng_state(state["cuda"]': _NO_CUDA,
            "return": "taken where the engine finds nothing: it finds its checkpoint here",
        },
        '  args: [--out, "{out}", --save-at, "8,12", --stage, "{zero_stage}"]\n' + _STEPS,
        """\
topologies:
  two: {dp: 2, zero_stage: 0}
  one: {dp: 1, zero_stage: 0}
matrix:
  - {source: two, targets: [two, one]}""",
        needs="deepspeed",
    ),
    Reference(
        "two_tiers",
        ("load", "main"),
        {
            'print(f"rank {RANK} resumes from': _ONLY_OUTPUT,
            'raise SystemExit("told to resume': "taken where nothing is there: something is, here",
        },
        """\
  args: [--out, "{out}", --save-every, "3", --memory, "{memory_tier}", --memory-every, "2"]
  resume_args: [--resume]
  checkpoint: "{out}/step-{step}"
  saves: [9, 12, 15]
  restore_step: 12
  window: 7
  memory_tier: {saves: [10, 14], rank_files: "**/rank{rank}.pt"}""",
        """\
topologies:
  two: {dp: 2}
matrix:
  - {source: two, target: two}""",
    ),
)


@dataclass(frozen=True)
class Mutant:
    """A job without one statement."""

    reference: Reference
    line: int
    dropped: str
    source: str


@dataclass(frozen=True)
class Result:
    """What the drill said of a mutant."""

    mutant: Mutant
    outcome: str  # caught, loud, explained, missed
    detail: str


def mutants(reference: Reference) -> Iterator[Mutant]:
    """One mutant per statement of the restore code, in the order of the file."""
    text = (JOBS / f"{reference.name}.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    for statement in _restoring(ast.parse(text), reference.functions):
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        indent = lines[first][: statement.col_offset]
        changed = [*lines[:first], f"{indent}pass", *lines[last:]]
        dropped = " ".join(line.strip() for line in lines[first:last])
        yield Mutant(reference, statement.lineno, dropped, "\n".join(changed) + "\n")


def _restoring(tree: ast.Module, functions: tuple[str, ...]) -> Iterator[ast.stmt]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in functions:
            body = function.body
            if function.name == "main":
                body = [
                    inner
                    for statement in body
                    if isinstance(statement, ast.If)
                    and ast.unparse(statement.test) == "args.resume"
                    for inner in statement.body
                ]
            yield from _statements(body)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements; of an `if`, those of both branches, not the whole."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            yield statement


def drill(mutant: Mutant, folder: Path) -> Result:
    """Run the mutant through the command line and read the verdicts."""
    reference = mutant.reference
    place = folder / f"{reference.name}-line{mutant.line}"
    matrix = MATRIX.format(program=place / "job.py", job=reference.job, rest=reference.rest)
    verdicts, said = drilled(place, mutant.source, matrix)
    if not verdicts:
        return Result(mutant, "missed", f"no verdict: {said}")
    return _result(mutant, verdicts)


def drilled(place: Path, source: str, matrix: str) -> tuple[list[dict[str, str]], str]:
    """The verdicts of `place`/job.py, which gets this source, and the end of what was said."""
    place.mkdir(parents=True)
    (place / "job.py").write_text(source, encoding="utf-8")
    (place / "mutant.yaml").write_text(matrix, encoding="utf-8")
    command = [sys.executable, "-m", "ckptdrill", "run", str(place / "mutant.yaml")]
    done = subprocess.run(
        [*command, "--launcher", "warm", "--runs", str(place / "runs")],
        capture_output=True,
        text=True,
        check=False,
    )
    files = sorted((place / "runs").glob("mutant/latest/cells/*/verdict.json"))
    verdicts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return verdicts, done.stderr.strip()[-200:]


def _result(mutant: Mutant, verdicts: list[dict[str, str]]) -> Result:
    diverged = [v for v in verdicts if v["reason"] == "diverged"]
    loud = [v for v in verdicts if v["reason"] in {"crashed", "refused", "source-failed"}]
    if diverged:
        return Result(
            mutant, "caught", f"{diverged[0]['blame_item']}: {diverged[0]['explanation']}"
        )
    if loud:
        return Result(mutant, "loud", loud[0]["explanation"])
    known = mutant.reference.explained.items()
    why = next((w for start, w in known if mutant.dropped.startswith(start)), None)
    if why is not None:
        return Result(mutant, "explained", why)
    return Result(mutant, "missed", "; ".join(f"{v['word']} {v['reason']}" for v in verdicts))


def main() -> int:
    """Drill all mutants, print the table and the score."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutants side by side")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("names", nargs="*", metavar="JOB", help="default: all reference jobs")
    options = parser.parse_args()
    chosen = [r for r in REFERENCES if not options.names or r.name in options.names]
    here = [r for r in chosen if importlib.util.find_spec(r.needs)]
    for reference in chosen:
        if reference not in here:
            print(f"{reference.name}: not run, {reference.needs} is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        with ThreadPoolExecutor(options.jobs) as pool:
            every = [mutant for reference in here for mutant in mutants(reference)]
            results = list(pool.map(lambda m: drill(m, folder), every))
    for result in results:
        mutant = result.mutant
        where = f"{mutant.reference.name}:{mutant.line}"
        print(f"{where:<20} {result.outcome:<9} {mutant.dropped[:60]}")
        print(f"{'':20} {result.detail[:160]}")
    counts = {
        o: sum(r.outcome == o for r in results) for o in ("caught", "loud", "explained", "missed")
    }
    print(f"{len(results)} statements dropped: " + ", ".join(f"{n} {o}" for o, n in counts.items()))
    return 1 if counts["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
