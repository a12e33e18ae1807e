"""Models that a script built and dropped are no state; frozen and averaged ones are."""

from types import SimpleNamespace
from typing import Any, cast

from ckptdrill.judge.leftovers import taken_off
from ckptdrill.judge.trajectory import Pair
from ckptdrill.model import Fact

Held = dict[str, str]  # name -> content


def state(rank: int, step: int, held: Held) -> Fact:
    groups = [[{"members": [name for name in held if ":" not in name]}]]
    return Fact("state", rank, step, {"weights": held, "buffers": {}, "groups": groups}, rank)


def ran(*steps: list[Held]) -> Any:
    """A run that was sampled at these steps, by rank."""
    facts = [tuple(state(r, n, h) for r, h in enumerate(ranks)) for n, ranks in enumerate(steps)]
    return SimpleNamespace(
        sampled_steps=lambda: range(len(facts)), sample=lambda _kind, step: facts[step]
    )


def left(source: Any, target: Any) -> tuple[list[set[str]], list[set[str]]]:
    """The names of each rank that remain on either side."""
    pair = cast("Pair", SimpleNamespace(reference=source, restored=target))
    sides = taken_off(pair, source.sample("state", 0), target.sample("state", 0))
    source_names, target_names = ([set(f.data["weights"]) for f in side] for side in sides)
    return source_names, target_names


STAGES = [{"0.weight": "a", "rest:1.weight": "B"}, {"1.weight": "b", "rest:0.weight": "A"}]
TRAINED = [{"0.weight": "a2", "rest:1.weight": "B"}, {"1.weight": "b2", "rest:0.weight": "A"}]
WHOLE = [{"0.weight": "a", "1.weight": "b"}]


def test_what_a_pipeline_built_and_dropped_is_taken_off() -> None:
    source, target = left(ran(STAGES, TRAINED), ran(WHOLE, WHOLE))
    assert source == [{"0.weight"}, {"1.weight"}]
    assert target == [{"0.weight", "1.weight"}]


def test_a_frozen_teacher_that_both_have_stays() -> None:
    teacher = {"teacher:w": "T"}
    two = [{"w": "a", **teacher}, {"w": "a", **teacher}]
    one = [{"w": "a", **teacher}]
    source, target = left(ran(two, two), ran(one, one))
    assert all("teacher:w" in names for names in (*source, *target))


def test_a_frozen_teacher_of_other_content_stays_to_be_compared() -> None:
    two = [{"w": "a", "teacher:w": "T"}] * 2
    one = [{"w": "a", "teacher:w": "X"}]
    _, target = left(ran(two, two), ran(one, one))
    assert target == [{"w", "teacher:w"}]


def test_an_average_moves_and_stays_though_the_target_lost_it() -> None:
    before, after = ([{"w": "a", "ema:w": ema}] * 2 for ema in ("1", "2"))
    source, _ = left(ran(before, after), ran([{"w": "a"}], [{"w": "b"}]))
    assert all("ema:w" in names for names in source)


def test_on_equal_ranks_nothing_is_taken_off() -> None:
    source, _ = left(ran(STAGES, TRAINED), ran(STAGES, TRAINED))
    assert source == [set(held) for held in STAGES]


def test_a_run_that_was_sampled_once_shows_nothing_to_be_idle() -> None:
    source, _ = left(ran(STAGES), ran(WHOLE))
    assert source == [set(held) for held in STAGES]
