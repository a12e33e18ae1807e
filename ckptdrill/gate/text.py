"""The gate on a terminal: one line per condition, and what to do for each that is not held."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ckptdrill.gate.conditions import Condition, Standing
from ckptdrill.packet.text import visible


def show(console: Console, found: Sequence[Condition]) -> None:
    """Print every condition, then the sum."""
    width = max(len(each.name) for each in found)
    for each in found:
        line = f"{each.standing:<9}  {each.name:<{width}}  {visible(each.found)}"
        console.print(Text(line), soft_wrap=True)
        if each.next_move:
            console.print(Text(f"{'':<9}  {'':<{width}}  next: {each.next_move}"), soft_wrap=True)
    open_conditions = sum(each.standing is not Standing.HELD for each in found)
    console.print(
        f"approved: all {len(found)} conditions are held"
        if not open_conditions
        else f"not approved: {open_conditions} of {len(found)} conditions are not held"
    )
