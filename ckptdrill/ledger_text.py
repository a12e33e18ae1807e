"""The ledger on a terminal: what was measured, then the bill of a failure, a column per tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptdrill.ledger import PHASES, Entry, Restored
from ckptdrill.model import JsonValue


def _gpu_h(value: float) -> str:
    return f"{value:,.1f} GPU-h" if value >= 1 else f"{value:.3g} GPU-h"


_TIERS = {"memory": "memory tier intact", "after_loss": "memory tier lost, durable storage"}
_ROWS: tuple[tuple[str, Callable[[Entry], str]], ...] = (
    ("lost steps", lambda bill: f"{bill.lost_steps:,}"),
    ("recovery point", lambda bill: f"{bill.recovery_point_s:,.6g} s of training"),
    ("replay", lambda bill: f"{bill.replay_s:,.6g} s = {bill.replay_h:.3f} h"),
    ("restore", lambda bill: f"{bill.restore_h * 3600:,.6g} s = {bill.restore_h:.3f} h"),
    ("recovery time", lambda bill: f"{bill.recovery_time_h:.3f} h"),
    ("restore, occupied", lambda bill: _gpu_h(bill.restore_gpu_h)),
    ("replay, occupied", lambda bill: _gpu_h(bill.replay_gpu_h)),
    ("together", lambda bill: _gpu_h(bill.gpu_h)),
)


def show_restores(console: Console, found: Sequence[Restored]) -> None:
    """One row per restored cell: its phases, apart where the job lets them be told apart."""
    converted = any("conversion" in each.phases_s for each in found)
    phases = ("conversion", *PHASES) if converted else PHASES
    table = Table("cell", "ranks", *phases, "restore", "occupied", "step")
    for each in found:
        timed = bool(each.phases_s)
        table.add_row(
            Text(each.cell),
            str(each.ranks),
            *(each.phase(name) for name in phases),
            f"{each.restore_s:.3g} s" if timed else "–",
            f"{each.ranks * each.restore_s / 3600:.3g} rank-h" if timed else "–",
            "–" if each.step_s is None else f"{each.step_s:.3g} s",
        )
    console.print(table)
    console.print(
        "read, deserialize and reshard happen inside one load call where they are `in read`; "
        "validate is the drill's own fingerprinting and is not in `restore`.",
        soft_wrap=True,
    )
    for each in found:
        for key, name in _TIERS.items():
            if isinstance(each.tiers.get(key), Mapping):
                line = f"{each.cell}: {name}: {_recovery(each.tiers[key])}"
                console.print(Text(line), soft_wrap=True)


def _recovery(told: Mapping[str, JsonValue]) -> str:
    if told.get("recovery_s") is None or told.get("steps_lost") is None:
        return "not recovered"
    point = f"recovery point step {told['step']} ({told['steps_lost']} steps lost)"
    return f"{point}, recovery time {told['recovery_s']:.3g} s"


def show_bill(console: Console, bills: Sequence[Entry], origin: str) -> None:
    """The bill of one failure; `origin` says where the figures come from."""
    title = f"A failure on {bills[0].gpus:,} GPUs"
    table = Table("", *(f"{bill.tier} tier" for bill in bills), title=title)
    for name, value in _ROWS:
        table.add_row(name, *(value(bill) for bill in bills))
    console.print(table)
    console.print(Text(origin), soft_wrap=True)
    if len(bills) == 1:
        console.print(f"No other tier than the {bills[0].tier} one was given.")
