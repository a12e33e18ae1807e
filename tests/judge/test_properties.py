"""What must be true of every history: one verdict with a reason of the closed list, and no Pass
that survives the loss of a fact it rests on.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from ckptdrill.model import DamageKind, Held, Item, Policy, Reason, Tolerance, Verdict, VerdictWord
from tests.judge.history import History, damage_record, damaged, healthy, other
from tests.judge.training import Training

Edit = Callable[[History], History]
ONE_EPOCH = Policy(out_of_scope={"epoch boundary": "the older step lies in the first epoch"})
LAYOUTS = [("fsdp2", "fsdp2"), ("fsdp2", "ddp1"), ("ddp2", "ddp4"), ("fsdp2tp2", "ddp2")]


def same(history: History) -> History:
    return history


def noisy(history: History) -> History:
    return history.edited("stepped", lambda s: s.update(losses=[9.0]), launch="repeat")


def failing(history: History) -> History:
    error = [{"type": "builtins.OSError", "message": "disk full"}]
    return history.adding(history.fact("observer_failed", where="sample", error=error))


def crashing(history: History) -> History:
    error = [{"type": "builtins.RuntimeError", "message": "no"}]
    crash = history.fact("crashed", 0, 10.0, step=1, error=error)
    return history.cut(after=1).adding(crash).ended(returncode=1)


def hanging(history: History) -> History:
    return history.cut(after=0).without("load_end", rank=0).ended(timed_out=True)


ENDINGS: dict[str, Edit] = {
    "ends well": same,
    "never ran": lambda h: h.ended(never=True),
    "recorded nothing": lambda h: h.without(),
    "refused": lambda h: h.refused(0),
    "crashed": crashing,
    "hung": hanging,
    "timed out": lambda h: h.cut(after=2).ended(timed_out=True),
    "killed": lambda h: h.cut(after=1).ended(signal="SIGKILL", returncode=None),
    "ended early": lambda h: h.cut(after=0),
}
STATES: dict[str, Edit] = {
    "whole": same,
    "weights": lambda h: h.differs("weights", "mix.weight"),
    "moments": lambda h: h.loses("optimizer"),
    "no state": lambda h: h.without("state"),
    "no batches": lambda h: h.without("batch"),
    "no steps": lambda h: h.without("stepped"),
    "no start": lambda h: h.without("started"),
}
SURROUNDINGS: dict[str, Edit] = {
    "as planned": same,
    "source never ran": lambda h: h.ended("source", never=True),
    "source empty": lambda h: h.without(launch="source"),
    "source killed": lambda h: h.cut("source", after=2).ended("source", returncode=1),
    "source unsampled": lambda h: h.without("state", launch="source"),
    "noisy": noisy,
    "observer failed": failing,
    "control failed": lambda h: h.given(control_failed="weights"),
    "nothing declared": lambda h: h.given(policy=Policy()),
    "tolerant": lambda h: h.given(tolerance=Tolerance(loss=1.0)),
    "no repeat": lambda h: h.ended("repeat", never=True),
}


def unfired() -> History:
    history = damaged()
    assert history.evidence.plan.damage is not None
    return history.given(damage=damage_record(history.evidence.plan.damage, fired=False))


CELLS: dict[str, Callable[[], History]] = {
    "same": healthy,
    "grown": lambda: healthy("ddp1", "fsdp2"),
    "uneven": lambda: healthy("ddp2", "ddp3"),
    "summed": lambda: healthy("ddp2", "ddp4", control=Training(gradient_factor=2.0)),
    "damaged": damaged,
    "unfired": unfired,
    "fallen back": lambda: damaged(DamageKind.DELETE, back_to=4).given(policy=ONE_EPOCH),
    "lied to": lambda: damaged(DamageKind.POINTER),
}


def pairs(*dimensions: Iterable[str]) -> set[tuple[str, ...]]:
    """Every choice in which at most two dimensions are not as they should be (their first)."""
    ways = [list(dimension) for dimension in dimensions]
    return {
        names
        for names in itertools.product(*ways)
        if sum(name != way[0] for name, way in zip(names, ways, strict=True)) <= 2
    }


def singles(*dimensions: Iterable[str]) -> set[tuple[str, ...]]:
    """The same with at most one."""
    ways = [list(dimension) for dimension in dimensions]
    healthy_ones = [way[0] for way in ways]
    return {
        (*healthy_ones[:n], name, *healthy_ones[n + 1 :])
        for n, way in enumerate(ways)
        for name in way
    }


HISTORIES = [
    *((cell, names) for cell in CELLS for names in sorted(singles(ENDINGS, STATES, SURROUNDINGS))),
    *(("grown", names) for names in sorted(pairs(ENDINGS, STATES, SURROUNDINGS))),
]


def test_every_history_gets_exactly_one_verdict() -> None:
    cells = {name: make() for name, make in CELLS.items()}
    reasons = set()
    for cell, names in HISTORIES:
        ending, state, around = names
        history = SURROUNDINGS[around](STATES[state](ENDINGS[ending](cells[cell])))
        reasons.add(sound(history.verdict(), (cell, *names)).reason)
    elsewhere = {Reason.DOCUMENTED_LIMIT, Reason.FAILED_CLOSED, Reason.UNSAFE_SAVE}
    elsewhere |= {Reason.HALF_CONVERTED}
    assert reasons == set(Reason) - elsewhere


def sound(verdict: Verdict, about: tuple[str, ...]) -> Verdict:
    """What every verdict owes its reader, whatever happened."""
    broken = [check for check in verdict.checks if check.status is Held.BROKEN]
    assert verdict.explanation, about
    assert "the judge failed on these facts" not in verdict.explanation, about
    assert (verdict.word is VerdictWord.PASS) == (
        verdict.reason in {Reason.HELD, Reason.FELL_BACK}
    ), about
    if verdict.word is VerdictWord.PASS:
        assert not broken, about
        assert about[1:3] == ("ends well", "whole"), about
    else:
        assert verdict.next_move, (about, verdict.explanation)
    if verdict.reason is Reason.DIVERGED:
        assert broken, about
        assert verdict.blame_item, about
        assert verdict.blame_subject, about
        assert verdict.facts, about
    return verdict


def resting(history: History) -> dict[str, Item]:
    """The facts that a Pass cites for what held, and an item that each of them carries."""
    verdict = history.verdict()
    assert verdict.word is VerdictWord.PASS, verdict.explanation
    return {
        ref: check.item
        for check in verdict.checks
        if check.status is Held.HELD
        for ref in check.facts
        if ref.startswith("launches/")
    }


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_no_pass_survives_the_loss_of_one_fact_it_rests_on(layouts: tuple[str, str]) -> None:
    history = healthy(*layouts)
    facts = resting(history)
    assert len(facts) > 20
    for ref, item in facts.items():
        verdict = history.without_ref(ref).verdict()
        assert verdict.word is VerdictWord.UNPROVEN, (ref, item, verdict.explanation)


def test_no_fall_back_survives_the_loss_of_one_fact_it_rests_on() -> None:
    history = damaged(back_to=4).given(policy=ONE_EPOCH)
    for ref, item in resting(history).items():
        verdict = history.without_ref(ref).verdict()
        assert verdict.word is not VerdictWord.PASS, (ref, item, verdict.explanation)
    assert history.given(damage=None).verdict().word is VerdictWord.UNPROVEN


def test_no_job_is_said_to_withstand_a_lie_without_a_fact_it_rests_on() -> None:
    history = damaged(DamageKind.POINTER)
    for ref, item in resting(history).items():
        verdict = history.without_ref(ref).verdict()
        assert verdict.word is not VerdictWord.PASS, (ref, item, verdict.explanation)
    assert history.given(damage=None).verdict().word is VerdictWord.UNPROVEN


KINDS = ["started", "state", "batch", "stepped", "stopped", "inventory"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launch", ["source", "restore"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_no_pass_survives_a_rank_that_lost_one_kind_of_fact(
    layouts: tuple[str, str], launch: str, kind: str
) -> None:
    history = healthy(*layouts)
    for rank in history.record(launch).ranks:
        verdict = history.without(kind, launch=launch, rank=rank).verdict()
        assert verdict.word is VerdictWord.UNPROVEN, (rank, verdict.explanation)
        assert verdict.reason is not Reason.HARNESS_ERROR, (rank, verdict.explanation)


@pytest.mark.parametrize("launch", ["source", "restore"])
def test_no_pass_survives_a_rank_that_lost_its_random_state(launch: str) -> None:
    for rank in (0, 1):
        assert healthy().without("rng", launch=launch, rank=rank).verdict().word is not (
            VerdictWord.PASS
        )


@pytest.mark.parametrize("launch", ["source", "restore"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_no_pass_survives_the_loss_of_one_ranks_file(layouts: tuple[str, str], launch: str) -> None:
    history = healthy(*layouts)
    for rank in history.record(launch).ranks:
        assert history.without(launch=launch, rank=rank).verdict().word is not VerdictWord.PASS


PARTS = ["weights", "buffers", "optimizer", "groups", "schedulers", "scalers", "projections"]


@pytest.mark.parametrize("part", PARTS)
def test_a_difference_on_any_rank_is_no_pass(part: str) -> None:
    """Whatever one rank holds differently in the restored run, a Pass is gone."""

    def change(state: dict[str, Any]) -> None:
        held = state[part]
        if part == "projections":
            held.update({name: [value * 2 for value in values] for name, values in held.items()})
        elif isinstance(held, dict):
            held.update({name: other(value) for name, value in held.items()})
        else:
            held.clear()

    history = healthy("fsdp2", "fsdp4")
    for rank in range(4):
        verdict = history.state(change, rank=rank).verdict()
        assert verdict.word is not VerdictWord.PASS, (part, rank)
        assert verdict.reason is not Reason.HARNESS_ERROR, (part, rank, verdict.explanation)


def test_a_job_that_exercises_less_never_passes_more() -> None:
    for job in (Training(draws=False), Training(epochs=False)):
        assert healthy(job=job).verdict().reason is Reason.NOT_EXERCISED
