"""What `ckptdrill claims` prints: the documentation matrix, and the quotes behind it.

In this order: two tables of stacks against migration cases (one would be too wide for a terminal),
where a letter says what the documents of a stack do with a case; what the letters mean; and, for
one stack or on request, every claim with its quote and where it was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckptdrill.claims import DocumentedClaim, Label, MigrationCase, Stack, every
from ckptdrill.model import JsonValue, to_json

_LETTERS = {Label.DOCUMENTED: "D", Label.LIMIT: "L", Label.UNPROVEN: "u"}
_STYLES = {Label.DOCUMENTED: "green", Label.LIMIT: "yellow", Label.UNPROVEN: "dim"}
# Column heads: short, since twenty of them have to fit.
_LAYOUT = {
    MigrationCase.WORLD_SIZE: "ranks",
    MigrationCase.DATA_PARALLEL: "dp",
    MigrationCase.TENSOR_PARALLEL: "tp",
    MigrationCase.PIPELINE_PARALLEL: "pp",
    MigrationCase.EXPERT_PARALLEL: "ep",
    MigrationCase.ZERO_STAGE: "zero",
    MigrationCase.SHARDING: "shard",
    MigrationCase.HARDWARE: "nodes",
    MigrationCase.OPTIMIZER_FORMAT: "optim",
    MigrationCase.WEIGHTS_ONLY: "model",
}
_REST = {
    MigrationCase.TRAINING_STATE: "state",
    MigrationCase.DATA_CURSOR: "data",
    MigrationCase.RANDOM_STATE: "rng",
    MigrationCase.KEYS: "keys",
    MigrationCase.ASYNC_SAVE: "async",
    MigrationCase.COMMIT: "save",
    MigrationCase.CORRUPTION: "bytes",
    MigrationCase.POINTER: "ptr",
    MigrationCase.MEMORY_TIER: "tier",
    MigrationCase.VERSION_SKEW: "skew",
}


def show(console: Console, stacks: Sequence[Stack], *, quotes: bool) -> None:
    """Print the matrix of `stacks`; with `quotes` every claim as well."""
    for title, heads in (("When the layout changes", _LAYOUT), ("State, faults, versions", _REST)):
        console.print(_matrix(title, heads, stacks))
    console.print(_legend())
    if quotes:
        for stack in stacks:
            console.print(Text(f"\n{stack.id}: {stack.title}", style="bold"))
            for part in _claims(claims_of(stack)):
                console.print(part)


def claims_of(stack: Stack) -> tuple[DocumentedClaim, ...]:
    """The claims of one stack, by migration case."""
    order = list(MigrationCase)
    found = (claim for claim in every() if stack.id in claim.stacks)
    return tuple(sorted(found, key=lambda claim: order.index(claim.case)))


def as_json(stacks: Iterable[Stack]) -> JsonValue:
    """The same for programs: the stacks by name, and every claim that speaks of one of them."""
    named = {stack.id: stack for stack in stacks}
    found = [claim for claim in every() if named.keys() & set(claim.stacks)]
    return {"stacks": to_json(named), "claims": to_json(found)}


def _matrix(title: str, heads: dict[MigrationCase, str], stacks: Sequence[Stack]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for head in heads.values():
        table.add_column(head, justify="center", no_wrap=True)
    for stack in stacks:
        by_case = {case: list(each) for case, each in groupby(claims_of(stack), lambda c: c.case)}
        table.add_row(Text(stack.id), *(_mark(by_case.get(case, ())) for case in heads))
    return table


def _mark(claims: Sequence[DocumentedClaim]) -> Text:
    """`D`, `L`, `DL` or `u`; a question mark says that some of it was not found at its source."""
    if not claims:
        return Text("·", style="dim")
    labels = [label for label in Label if any(claim.label is label for claim in claims)]
    doubt = "" if all(claim.verified for claim in claims) else "?"
    return Text("".join(_LETTERS[label] for label in labels) + doubt, style=_STYLES[labels[0]])


def _legend() -> Text:
    heads = ", ".join(f"{head}: {case}" for case, head in (_LAYOUT | _REST).items())
    return Text(
        "\nD documented · L limited by a page · u read, and not stated · "
        "· nothing read for it · ? quote not found at its source\n"
        f"{heads}\n"
        "This is what documents say, not what a drill showed."
    )


def _claims(claims: Iterable[DocumentedClaim]) -> Iterator[RenderableType]:
    for claim in claims:
        mark = "" if claim.verified else ", not verified at its source"
        head = Text(f"{claim.label} · {claim.case}{mark}", style=_STYLES[claim.label])
        quote = f"“{claim.quote}”" if claim.quote else "(no quote: nothing is stated)"
        if not claim.quote and claim.label is not Label.UNPROVEN:
            quote = "(no quote at hand)"
        source = claim.source
        lines = Text(f"{claim.says}\n{quote}\n")
        lines.append(f"{source.title}, {source.version}, read {source.read}\n", style="dim")
        lines.append(source.address, style="dim")
        yield Padding(head, (1, 0, 0, 2))
        yield Padding(lines, (0, 0, 0, 4))
