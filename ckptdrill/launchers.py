"""Which launcher starts each launch: the production command line, or a warm fork where it is sound.

In `auto` every source runs cold and its first repeat warm; once the two have recorded the same
facts, the launches that belong to them run warm, and never before. Whatever speaks against it (a
difference, an environment without such a pair, a parent that cannot serve) makes the launch cold,
and the run says why.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from ckptdrill.errors import UserError
from ckptdrill.launch import local
from ckptdrill.model import Launch, Plan, Role, Step

# Imports of a large framework on a loaded machine; past this, a cold launch is quicker.
_LONGEST_IMPORT_S = 120.0


class Mode(StrEnum):
    """What `--launcher` chooses."""

    AUTO = "auto"
    WARM = "warm"
    TORCHRUN = "torchrun"


class Pair(NamedTuple):
    """A source started cold and its repeat started warm, by id, and the environment of both."""

    source_id: str
    repeat_id: str
    environment: str


def probes(plans: Sequence[Plan]) -> dict[str, Launch]:
    """Extra repeats, by id, for the sources whose plan has none: one warm look at each."""
    return {
        probe.id: probe
        for plan in plans
        if not plan.repeats
        for probe in (replace(plan.source, id=f"warm-check.{plan.source.id}", role=Role.REPEAT),)
    }


def pairs_of(plans: Sequence[Plan], further: Sequence[Step] = ()) -> dict[str, Pair]:
    """By launch id, the pair that must agree before that launch may run warm.

    It is the pair of the launch's own source where both run in one environment, else any pair of
    its environment; a launch in an environment without one is left out. `further` launches were
    planned while the run went on.
    """
    own: dict[str, Pair] = {}
    of_environment: dict[str, Pair] = {}
    for plan in plans:
        source = plan.source
        repeat_id = plan.repeats[0].id if plan.repeats else f"warm-check.{source.id}"
        pair = Pair(source.id, repeat_id, source.environment)
        of_environment.setdefault(source.environment, pair)
        own.setdefault(repeat_id, pair)
        for step in _launches(plan.steps):
            if step.environment == source.environment:
                own.setdefault(step.id, pair)
    for steps in (*(plan.steps for plan in plans), further):
        for step in _launches(steps):
            if step.environment in of_environment:
                own.setdefault(step.id, of_environment[step.environment])
    return own


def choose(
    launch: Launch,
    mode: Mode,
    pair: Pair | None,
    verdicts: Mapping[Pair, str | None],
) -> str | None:
    """`torchrun`, `warm`, or None while the pair it depends on has not been compared.

    `verdicts` holds the pairs compared so far: None where both recorded the same, else what
    differs. One difference in an environment makes all later launches of it cold.
    """
    if launch.launcher is not None:
        return launch.launcher
    if mode is not Mode.AUTO:
        return mode.value
    if launch.role is Role.SOURCE or pair is None:
        return Mode.TORCHRUN.value
    if any(why and other.environment == launch.environment for other, why in verdicts.items()):
        return Mode.TORCHRUN.value
    if launch.id == pair.repeat_id:
        return Mode.WARM.value
    return Mode.WARM.value if pair in verdicts else None


@dataclass
class WarmParents:
    """One warm parent per environment, started ahead of use; `refusals`: why one cannot serve."""

    pack: Path
    control: Path
    parents: dict[str, local.WarmParent] = field(default_factory=dict)
    began_s: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def begin(self, environment: str, description: Mapping[str, Any]) -> None:
        """Start the imports of `environment`, with the variables of a launch `description`.

        What marks a process as part of one launch is left out: the parent belongs to none.
        """
        control = self.control / environment
        own = ("CKPTDRILL_LAUNCH", "TMPDIR")
        env = {name: value for name, value in description["env"].items() if name not in own}
        try:
            parent = local.WarmParent(description["python"], self.pack, control, env)
        except (OSError, UserError) as error:
            self.refusals[environment] = f"the warm parent could not be started: {error}"
            return
        self.parents[environment] = parent
        self.began_s[environment] = time.monotonic()

    def importing(self, environment: str) -> bool:
        """True while it is too early to say whether the parent can serve."""
        parent = self.parents.get(environment)
        if parent is None or environment in self.refusals:
            return False
        answered = (parent.control_dir / "ready.json").exists()  # asked first: it may answer now
        if parent.ready(0.0):
            return False
        waited_s = time.monotonic() - self.began_s[environment]
        if not answered and waited_s < _LONGEST_IMPORT_S:
            return True
        self.refusals[environment] = parent.refusal() or "the warm parent is not ready"
        return False

    def importing_count(self) -> int:
        """How many parents may still come to serve."""
        return sum(self.importing(environment) for environment in self.parents)

    def refusal(self, environment: str, description: Mapping[str, Any]) -> str | None:
        """Why a launch of this `description` has to run cold after all; None when it need not."""
        if environment in self.refusals:
            return self.refusals[environment]
        parent = self.parents.get(environment)
        if parent is None:
            return "no warm parent was started"
        differing = parent.differences(description)
        return f"it needs its own {', '.join(differing)}" if differing else None

    def start(self, environment: str, description: Mapping[str, Any]) -> local.Running:
        """Fork a launch. Raises UserError when the parent has died."""
        return self.parents[environment].start(description)

    def close(self) -> None:
        """End all parents and whatever they still run."""
        for parent in self.parents.values():
            parent.close()


def _launches(steps: Sequence[Step]) -> list[Launch]:
    return [step for step in steps if isinstance(step, Launch)]
