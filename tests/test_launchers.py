"""A launch is warm only after a cold one and a warm one of its environment recorded the same."""

import time
from pathlib import Path
from typing import cast

import pytest

from ckptdrill.launch import local
from ckptdrill.launchers import Mode, Pair, WarmParents, choose, pairs_of, probes
from ckptdrill.model import Cell, Launch, Plan, Role, Topology
from ckptdrill.plan import SharedLaunches

TWO, ONE = Topology("two", dp_shard=2), Topology("one")
PAIR = Pair("source", "repeat", "default")


def launch(name: str, role: Role = Role.RESTORE, launcher: str | None = None) -> Launch:
    return Launch(name, role, TWO, "default", 8, launcher=launcher)


def plan(source_environment: str, target_environment: str, repeats: int = 1) -> Plan:
    cell = Cell("cell", TWO, source_environment, ONE, target_environment, "version-skew")
    return SharedLaunches(4, (4,), 8, repeats).continues(cell)


@pytest.mark.parametrize(
    ("subject", "verdicts", "launcher"),
    [
        (launch("source", Role.SOURCE), {}, "torchrun"),
        (launch("repeat", Role.REPEAT), {}, "warm"),
        (launch("restore"), {}, None),
        (launch("restore"), {PAIR: None}, "warm"),
        (launch("restore"), {PAIR: "loss differs"}, "torchrun"),
        (launch("restore"), {Pair("s", "r", "default"): "loss differs"}, "torchrun"),
        (launch("restore"), {PAIR: None, Pair("s", "r", "other"): "loss differs"}, "warm"),
        (launch("restore", launcher="torchrun"), {PAIR: None}, "torchrun"),
    ],
)
def test_auto_asks_the_comparison(
    subject: Launch, verdicts: dict[Pair, str | None], launcher: str | None
) -> None:
    assert choose(subject, Mode.AUTO, PAIR, verdicts) == launcher


@pytest.mark.parametrize("mode", [Mode.WARM, Mode.TORCHRUN])
def test_a_choice_of_the_user_needs_no_comparison(mode: Mode) -> None:
    assert choose(launch("restore"), mode, PAIR, {PAIR: "loss differs"}) == mode.value


def test_without_a_comparison_a_launch_is_cold() -> None:
    assert choose(launch("restore"), Mode.AUTO, None, {}) == "torchrun"


def test_another_environment_needs_a_comparison_of_its_own() -> None:
    pairs = pairs_of([plan("old", "new")])
    assert pairs["restore.two-old.baseline"] == Pair("source.two-old", "repeat1.two-old", "old")
    assert "restore.cell" not in pairs
    pairs = pairs_of([plan("old", "new"), plan("new", "new")])
    assert pairs["restore.cell"] == Pair("source.two-new", "repeat1.two-new", "new")


def test_a_source_without_repeats_gets_a_probe() -> None:
    without = plan("default", "default", repeats=0)
    (probe,) = probes([without]).values()
    assert (probe.id, probe.role) == ("warm-check.source.two", Role.REPEAT)
    assert pairs_of([without])["restore.cell"].repeat_id == probe.id
    assert probes([plan("default", "default")]) == {}


class AnswersMeanwhile:
    """A warm parent whose answer arrives just after it was asked for."""

    def __init__(self, control_dir: Path) -> None:
        self.control_dir = control_dir
        self.asked = 0

    def ready(self, timeout_s: float) -> bool:
        assert timeout_s == 0.0
        self.asked += 1
        (self.control_dir / "ready.json").write_text("{}")
        return self.asked > 1

    def refusal(self) -> str | None:
        return None


def test_a_parent_that_answers_while_it_is_asked_is_not_given_up(tmp_path: Path) -> None:
    parents = WarmParents(tmp_path, tmp_path, began_s={"default": time.monotonic()})
    parents.parents["default"] = cast("local.WarmParent", AnswersMeanwhile(tmp_path))
    assert parents.importing("default")
    assert not parents.importing("default")
    assert parents.refusals == {}
