"""Healthy jobs under the rounding of a GPU: is one accused? And what is the least that is found?

Two sources of healthy cells: those of the corpus, and the reference job between ten layouts of one
to four ranks, in four variants of precision, accumulation and dropout. Every script
begins with `rounding.spread`, which moves each gradient by a unit in the last place, differently in
every launch; each matrix has a repeat of its source, as is usual where a job does not reproduce
itself bit by bit.

    python tests/corpus/healthy.py [--jobs N] [--runs FOLDER] [NAME …]
    python tests/corpus/healthy.py --smallest

The first prints each cell that does not pass and the score, and exits 1 when one is accused. The
second scales all gradients at the target alone, by less and less, and prints what is still found.
"""

from __future__ import annotations

import argparse
import ast
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import run as corpus
from elsewhere import JOB, before_the_step

HERE = Path(__file__).resolve().parent
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one": {"dp_shard": 1},
    **{f"fsdp{n}": {"dp_shard": n} for n in (2, 3, 4)},
    **{f"ddp{n}": {"dp_replicate": n} for n in (2, 3, 4)},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2": {"tp": 2},
    "fsdp2tp2": {"dp_shard": 2, "tp": 2},
}
VARIANTS = {
    "fp32": ("--dropout=0",),
    "fp32-accumulated": ("--accumulation=2",),
    "bf16": ("--dtype=bf16", "--dropout=0"),
    "bf16-accumulated": ("--dtype=bf16", "--accumulation=2"),
}
# All gradients times 1 + one of these, at the target alone.
EXCESS = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
HOUR_S = 3600.0


def with_rounding(text: str) -> str:
    """The script with one line more, after its docstring and its imports from the future."""
    lines = text.splitlines(keepends=True)
    last = 0
    for node in ast.parse(text).body:
        documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not documents and getattr(node, "module", "") != "__future__":
            break
        last = node.end_lineno or 0
    line = f"import rounding; rounding.spread({secrets.token_hex(4)!r})\n"
    return "".join([*lines[:last], line, *lines[last:]])


def corpus_cases() -> Iterator[corpus.Case]:
    """The cells of the corpus that must pass, repeated."""
    for case in corpus.load_cases():
        cells = tuple(cell for cell in case.cells if cell["expect"]["verdict"] == "Pass")
        if cells:
            rest = {**case.rest, "repeats": max(1, case.rest.get("repeats", 1))}
            yield replace(case, cells=cells, rest=rest)


def reference_case(name: str, arguments: Sequence[str]) -> corpus.Case:
    """The reference job from every layout to every layout."""
    expect = {"verdict": "Pass"}
    cells = ({"source": s, "target": t, "expect": expect} for s in LAYOUTS for t in LAYOUTS)
    return corpus.Case(
        id=name,
        title="the reference job",
        script=str(JOB),
        link="",
        job={
            "args": [
                *("--out={out}", "--save-at=5,7", "--dp-replicate={dp_replicate}"),
                *("--dp-shard={dp_shard}", "--tp={tp}", *arguments),
            ],
            "resume_args": ["--resume", "{resume}"],
            "checkpoint": "{out}/step-{step}",
            "saves": [5, 7],
            "restore_step": 5,
            "window": 4,
            "env": {"GLOBAL_BATCH": "12", "OMP_NUM_THREADS": "1"},
            "timeout_s": 180,
        },
        rest={
            "repeats": 1,
            "policy": {
                "rng": {"same_world_size": "continued", "other_world_size": "not_guaranteed"}
            },
        },
        topologies=LAYOUTS,
        cells=tuple(cells),
    )


def rounded(case: corpus.Case, folder: Path, change: str = "") -> corpus.Case:
    """The case with its script copied into `folder`, rounded; `change` goes before the step."""
    place = folder / case.id
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "rounding.py", place)
    source = corpus.CORPUS / case.script
    for module in source.parent.glob("*.py") if source.parent == corpus.CORPUS else ():
        if re.search(rf"\b(import|from) {module.stem}\b", source.read_text(encoding="utf-8")):
            shutil.copy(module, place)
    script = place / source.name
    text = source.read_text(encoding="utf-8")
    text = before_the_step(text, change) if change else text
    script.write_text(with_rounding(text), encoding="utf-8")
    return replace(case, script=str(script))


def healthy(names: Sequence[str], folder: Path, jobs: int) -> int:
    """Drill all healthy cells; what is not a Pass is named."""
    cases = [*(reference_case(n, a) for n, a in VARIANTS.items()), *corpus_cases()]
    chosen = [case for case in cases if not names or case.id in names]
    begun = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        made = [rounded(case, folder) for case in chosen]
        results = [
            r for each in pool.map(lambda c: corpus.run_case(c, folder, HOUR_S), made) for r in each
        ]
    kinds: Counter[str] = Counter()
    for result in results:
        word = result.said.split(" ", 1)[0]
        kind = {"Pass": "passed", "Unsupported": "accused", "Unproven": "unproven"}.get(word)
        kinds[kind or "not run"] += 1
        if kind != "passed":
            cell = f"{result.case.id} {result.cell['source']}->{result.cell['target']}"
            print(f"{kind or 'not run'}: {cell}: {result.said}")
    counts = ", ".join(f"{kinds[k]} {k}" for k in ("passed", "accused", "unproven", "not run"))
    print(f"{len(results)} healthy cells in {time.monotonic() - begun:.0f} s: {counts}")
    return int(kinds["accused"] > 0 or kinds["not run"] > 0)


def smallest(folder: Path) -> int:
    """The reference job from two ranks to four, its gradients scaled there by less and less."""
    for name in ("fp32", "bf16"):
        whole = reference_case(name, VARIANTS[name])
        cells = tuple(c for c in whole.cells if (c["source"], c["target"]) == ("fsdp2", "fsdp4"))
        for excess in (*EXCESS, 0.0):
            case = replace(whole, id=f"{name}-{excess:g}", cells=cells)
            change = (
                "    if WORLD_SIZE == 4:\n"
                "        for p in (p for p in run.model.parameters() if p.grad is not None):\n"
                f"            p.grad.mul_({1 + excess})\n"
            )
            (result,) = corpus.run_case(rounded(case, folder, change), folder)
            print(f"{name}: all gradients times {1 + excess:g}: {result.said}", flush=True)
    return 0


def main() -> int:
    """Drill, print, and score."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", help="cases of the corpus, or " + ", ".join(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1, help="matrices side by side")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--smallest", action="store_true", help="what is the least that is found?")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.runs or Path(scratch)).resolve()
        if options.smallest:
            return smallest(folder)
        return healthy(options.names, folder, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
