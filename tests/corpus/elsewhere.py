"""Change the training code of the reference job at the target topology alone: is it found?

Each mutant trains as it should on two ranks, saves, and is restored on four, where one thing is
another: a product or quotient lost its second operand, a constant of the optimizer is multiplied, a
mean became a sum, a norm is a rank's own, a group is another. Its state comes back bit by bit. A
mutant must be found (Unsupported for the right reason), end loudly, or be explained by `EXPLAINED`.

    python tests/corpus/elsewhere.py [--jobs N] [--keep FOLDER]

prints one line per mutant and the score, and exits 1 when one passes unexplained.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutations import drilled

JOB = Path(__file__).parents[2] / "drills" / "jobs" / "torch_dcp.py"
SOURCE, TARGET = 2, 4
MATRIX = """\
version: 1
name: mutant
job:
  program: {program}
  timeout_s: 240
  args: [--out, "{{out}}", --save-at, "6,9", --accumulation, "2", {wrapper}]
  resume_args: [--resume, "{{resume}}"]
  checkpoint: "{{out}}/step-{{step}}"
  saves: [6, 9]
  restore_step: 6
  window: 4
policy:
  rng: {{same_world_size: continued, other_world_size: not_guaranteed}}
  out_of_scope: {{epoch boundary: the window is short, precision: no scaler in use}}
topologies:
  two: {{{degree}: 2}}
  four: {{{degree}: 4}}
matrix:
  - {{source: two, target: four}}
"""
SHARDS = ('--dp-replicate, "1"', "dp_shard")
REPLICAS = ('--dp-replicate, "{dp_replicate}"', "dp_replicate")
FUNCTIONS = {
    *("rows", "forward", "wrap", "build_optimizer", "build_model", "build", "factor"),
    *("loss_of", "next_batch", "forward_backward", "train_step", "update_average"),
}
FOUND = {"trains-otherwise", "batch-plan", "diverged", "refused"}
# Beginnings of what may change and not be found, each with the reason.
EXPLAINED = {
    "1000 * (RANK + 1)": "the seed of each rank's own random numbers, declared not guaranteed",
    "total.item() *": "the loss that is printed, after the step",
}


@dataclass(frozen=True)
class Mutant:
    """The job with one change; `shown` is what was changed."""

    name: str
    shown: str
    source: str
    wrapper: tuple[str, str] = SHARDS


@dataclass(frozen=True)
class Result:
    """What the drill said of a mutant."""

    mutant: Mutant
    outcome: str  # found, loud, explained, missed
    detail: str


def mutants(text: str) -> Iterator[Mutant]:
    """Those of every product and quotient of the training code, then those written by hand."""
    for node in _operations(ast.parse(text)):
        whole = ast.get_source_segment(text, node) or ""
        left = ast.get_source_segment(text, node.left) or ""
        changed = _replaced(text, node, f"({whole} if WORLD_SIZE != {TARGET} else {left})")
        yield Mutant(f"line{node.lineno}-{node.col_offset}-{node.end_col_offset}", whole, changed)
    for number, (title, wrapper, change) in enumerate(BY_HAND):
        lines = [f"    if WORLD_SIZE == {TARGET}:", *change.splitlines()]
        body = "\n        ".join(lines) + "\n"
        yield Mutant(f"hand{number}", title, before_the_step(text, body), wrapper)


def before_the_step(text: str, change: str) -> str:
    """The reference job with further lines just before its optimizer steps.

    Raises SystemExit when it has no such place any more: the change would come to nothing.
    """
    if text.count(_STEP) != 1:
        raise SystemExit(f"the reference job has no {_STEP.strip()!r} any more: mend _STEP")
    return text.replace(_STEP, change + _STEP)


def _operations(tree: ast.Module) -> Iterator[ast.BinOp]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in FUNCTIONS:
            for node in ast.walk(function):
                if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
                    yield node


def _replaced(text: str, node: ast.expr, new: str) -> str:
    lines = text.splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    return "".join([*lines[:first], before + new + after, *lines[last + 1 :]])


_STEP = "    run.scaler.step(run.optimizer)\n"
# What is done to the gradients, the rates or the weights just before the optimizer steps.
_EACH = "for p in (p for p in run.model.parameters() if p.grad is not None):"
BY_HAND = (
    ("gradients are added up", SHARDS, f"{_EACH} p.grad.mul_(WORLD_SIZE)"),
    ("gradients are averaged once more", REPLICAS, f"{_EACH} p.grad.div_(2)"),
    (
        "gradients are clipped",
        REPLICAS,
        "nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)",
    ),
    (
        "clipped by the norm of a rank's own shards",
        SHARDS,
        """\
own = [p.grad.to_local() for p in run.model.parameters() if p.grad is not None]
norm = float(torch.stack([g.norm() for g in own]).norm())
for g in own: g.mul_(min(1.0, 0.02 / norm))""",
    ),
    (
        "one layer is averaged over another group",
        REPLICAS,
        """\
layer = next(p for p in run.model.parameters() if p.grad is not None and p.ndim > 1)
layer.grad.mul_(1.05)""",
    ),
    (
        "vectors take a gradient of each rank's own",
        REPLICAS,
        f"{_EACH} p.grad.mul_(1 + 0.1 * RANK if p.ndim == 1 else 1)",
    ),
    (
        "the rate is another",
        REPLICAS,
        'for group in run.optimizer.param_groups: group["lr"] *= 1.5',
    ),
    (
        "the betas are others",
        REPLICAS,
        'for group in run.optimizer.param_groups: group["betas"] = (0.8, 0.95)',
    ),
    (
        "weights decay by hand, beside the optimizer",
        REPLICAS,
        "with torch.no_grad(): [p.mul_(0.999) for p in run.model.parameters()]",
    ),
)


def drill(mutant: Mutant, folder: Path) -> Result:
    """Run the mutant through the command line and read the verdict at the target."""
    place = folder / mutant.name
    wrapper, degree = mutant.wrapper
    matrix = MATRIX.format(program=place / "job.py", wrapper=wrapper, degree=degree)
    verdicts, said = drilled(place, mutant.source, matrix)
    found = [verdict for verdict in verdicts if verdict["cell_id"].startswith("two_to_four")]
    if not found:
        return Result(mutant, "missed", f"no verdict: {said}")
    return _result(mutant, found[0])


def _result(mutant: Mutant, verdict: dict[str, str]) -> Result:
    said = f"{verdict['reason']}: {verdict['explanation']}"
    if verdict["word"] == "Unsupported" and verdict["reason"] in FOUND:
        return Result(mutant, "found", said)
    if verdict["reason"] == "crashed":
        return Result(mutant, "loud", said)
    known = EXPLAINED.items()
    why = next((reason for start, reason in known if mutant.shown.startswith(start)), None)
    if why is not None:
        return Result(mutant, "explained", why)
    return Result(mutant, "missed", f"{verdict['word']} {said}")


def main() -> int:
    """Drill all mutants, print the table and the score."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutants side by side")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    every = list(mutants(JOB.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(lambda mutant: drill(mutant, folder), every))
    for result in results:
        print(f"{result.mutant.name:<14} {result.outcome:<9} {result.mutant.shown[:70]}")
        print(f"{'':14} {result.detail[:200]}")
    counts = Counter(result.outcome for result in results)
    score = ", ".join(f"{counts[o]} {o}" for o in ("found", "loud", "explained", "missed"))
    print(f"{len(results)} changes at {TARGET} ranks: {score}")
    return 1 if counts["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
