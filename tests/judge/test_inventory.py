"""What the job saves next, leaf by leaf, against the reference's save of the same step."""

from typing import Any

import pytest

from ckptdrill.model import Held, Item, Policy, Reason, RngPolicy, VerdictWord
from tests.judge.history import RESTORE_STEP, History, healthy, other


def saving(edit: Any, launch: str = "restore", rank: int | None = None) -> History:
    """The first save after the restore holds other leaves."""
    return also(healthy("fsdp2", "fsdp4"), edit, launch, rank)


def also(history: History, edit: Any, launch: str, rank: int | None = None) -> History:
    step = 4 if launch == "restore" else 12
    return history.edited(
        "inventory", lambda i: edit(i["leaves"]), launch=launch, step=step, at="save", rank=rank
    )


def test_a_cursor_that_only_the_job_knows_is_blamed_by_its_key() -> None:
    verdict = saving(lambda leaves: leaves.update({"trainer.cursor": 0})).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert (verdict.blame_item, verdict.blame_subject) == (Item.INVENTORY, "trainer.cursor")
    assert "trainer.cursor is 0, the reference has 96" in verdict.explanation


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda leaves: leaves.pop("trainer.step"), "trainer.step is not saved"),
        (lambda leaves: leaves.update({"trainer.new": 1}), "trainer.new is new"),
    ],
)
def test_a_leaf_that_is_gone_or_new_is_blamed(edit: Any, words: str) -> None:
    assert words in saving(edit).check(Item.INVENTORY).summary


def test_a_tensor_that_differs_is_blamed() -> None:
    def change(leaves: dict[str, Any]) -> None:
        leaf = leaves["model.mix.weight"]
        leaf.update(entry=other(leaf["entry"]), projection=[9.0, 9.0])

    check = saving(change, rank=0).check(Item.INVENTORY)
    assert (check.status, check.subjects) == (Held.BROKEN, ("model.mix.weight",))


def _trained_otherwise(*names: str, cursor: int = 0, target: str = "fsdp4") -> History:
    """The first update was another, and so are these tensors of the next save."""

    def change(leaves: dict[str, Any]) -> None:
        for name in names:
            leaf = leaves[name]
            leaf.update(entry=other(leaf["entry"]), projection=[9.0, 9.0])
        leaves["trainer.cursor"] += cursor

    def update(state: dict[str, Any]) -> None:
        state["projections"]["mix.weight"] = [5.0, 5.0]

    history = also(healthy("fsdp2", target), change, "restore")
    return history.edited("state", update, step=1, at="forward")


def test_weights_that_differ_later_do_not_take_the_blame_from_the_update() -> None:
    history = _trained_otherwise("model.mix.weight", "model.embed.weight")
    verdict = history.verdict()
    assert (verdict.blame_item, verdict.blame_subject) == (Item.UPDATES, "mix.weight")
    assert "no checkpoint holds" in verdict.next_move
    assert history.check(Item.INVENTORY).status is Held.BROKEN


def test_a_leaf_of_the_jobs_own_is_named_before_weights_that_follow() -> None:
    verdict = _trained_otherwise("model.embed.weight", cursor=1).verdict()
    assert (verdict.blame_item, verdict.blame_subject) == (Item.INVENTORY, "trainer.cursor")


def _put(more: dict[str, Any], leaves: dict[str, Any]) -> None:
    leaves.update(more)


def _with_leaves(history: History, **more: Any) -> History:
    """Both runs save these as well: (what the reference has, what the restored run has)."""
    for launch, place in (("source", 0), ("restore", 1)):
        history = also(
            history,
            lambda leaves, n=place: leaves.update({k: v[n] for k, v in more.items()}),
            launch,
        )
    return history


def _tensor(digit: str) -> dict[str, Any]:
    return {"entry": ["float32", [2], [0], [2], digit * 32], "projection": [float(digit), 1.0]}


AVERAGE = {"average.mix.weight": (_tensor("1"), _tensor("2"))}
TABLE = {"table": (_tensor("3"), _tensor("4"))}


def _held_before(history: History, name: str) -> History:
    """The script held another number under this name before the first step."""
    then = history.fact("variables", step=RESTORE_STEP, values={name: 1.0})
    now = history.fact("variables", values={name: 2.0})
    return history.adding(then, launch="source").adding(now)


def _blamed(history: History) -> tuple[Item | None, str | None]:
    verdict = history.verdict()
    return verdict.blame_item, verdict.blame_subject


def test_an_average_of_weights_that_train_otherwise_follows_from_them() -> None:
    history = _with_leaves(_trained_otherwise("model.mix.weight", target="fsdp2"), **AVERAGE)
    assert _blamed(history) == (Item.UPDATES, "mix.weight")


def test_a_tensor_of_the_jobs_own_is_blamed_where_nothing_else_explains_the_update() -> None:
    history = _trained_otherwise("model.mix.weight", target="fsdp2")
    history = _with_leaves(history, **AVERAGE, **TABLE)
    assert _blamed(history) == (Item.INVENTORY, "table")
    explained = _held_before(history, "Trainer.clip")
    assert _blamed(explained) == (Item.UPDATES, "mix.weight")
    assert "Trainer.clip is 2, the reference has 1" in explained.verdict().explanation


def test_a_leaf_that_the_script_held_otherwise_before_is_the_cause() -> None:
    history = _trained_otherwise("model.mix.weight", target="fsdp2")
    history = _with_leaves(history, a_mean=(0.5, 0.6), rho=(0.06, 0.05), **AVERAGE, **TABLE)
    assert _blamed(_held_before(history, "main.rho")) == (Item.INVENTORY, "rho")
    assert _blamed(_held_before(history, "sum(Trainer.table)")) == (Item.INVENTORY, "table")


def test_what_the_source_does_not_reproduce_is_not_held_against_a_restore() -> None:
    def stamp(leaves: dict[str, Any]) -> None:
        leaves["saved_at"] = next(times)

    times = iter(range(100))
    history = healthy("fsdp2", "fsdp4")
    for launch in ("source", "repeat", "control", "restore"):
        history = also(history, stamp, launch)
    assert history.verdict().word is VerdictWord.PASS


def test_a_leaf_that_the_target_topology_itself_changes_is_no_fault_of_the_restore() -> None:
    def resize(leaves: dict[str, Any]) -> None:
        leaves["trainer.cursor"] = 48

    history = saving(resize)
    assert history.check(Item.INVENTORY).status is Held.BROKEN
    assert also(history, resize, "control").check(Item.INVENTORY).status is Held.HELD


def test_saved_random_state_counts_only_where_it_must_continue() -> None:
    def draw(leaves: dict[str, Any]) -> None:
        leaves["rng.torch"] = 2

    def seed(leaves: dict[str, Any]) -> None:
        leaves["rng.torch"] = 1

    history = healthy("fsdp2", "fsdp4")
    for launch in ("source", "repeat"):
        history = also(history, seed, launch)
    history = also(also(history, draw, "control"), draw, "restore")
    assert history.check(Item.INVENTORY).status is Held.HELD
    strict = also(history, seed, "control").given(
        policy=Policy(rng_other_world_size=RngPolicy.CONTINUED)
    )
    assert strict.check(Item.INVENTORY).status is Held.BROKEN


def test_a_job_that_saves_at_another_step_is_blamed() -> None:
    history = healthy().edited("inventory", lambda _: None)
    facts = [f for f in history.record("restore").facts if f.kind != "inventory" or f.step != 4]
    moved = [
        history.fact("inventory", r, step=3, at="save", call="save", path="/x/step-11", leaves={})
        for r in (0, 1)
    ]
    check = history.with_facts("restore", facts).adding(*moved).check(Item.INVENTORY)
    assert check.status is not Held.HELD
    assert check.subjects in {("save step",), ()}


def test_a_drill_without_a_later_save_exercises_nothing() -> None:
    kinds = ("inventory", "save_begin", "save_end")
    history = healthy().without(*kinds, from_step=1)
    assert history.check(Item.INVENTORY).status is Held.NOT_EXERCISED


def test_a_writer_that_the_observer_does_not_know_is_not_observed() -> None:
    history = healthy().without("inventory").without("inventory", launch="source")
    check = history.check(Item.INVENTORY)
    assert check.status is Held.NOT_OBSERVED
    assert "out of scope" in check.next_move


@pytest.mark.parametrize(("launch", "step"), [("source", 12), ("restore", 4)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_of_one_rank_that_went_unrecorded_is_not_a_difference(
    launch: str, step: int, rank: int
) -> None:
    history = healthy("fsdp2").without("inventory", launch=launch, step=step, rank=rank)
    assert history.check(Item.INVENTORY).status is Held.NOT_OBSERVED


@pytest.mark.parametrize("target", ["fsdp2", "fsdp4"])
@pytest.mark.parametrize("wrong", [0, -1, "text", None, [1], 96.5])
def test_a_plain_value_has_no_band(target: str, wrong: object) -> None:
    history = healthy("fsdp2", target)
    history = also(history, lambda leaves: leaves.update({"trainer.cursor": wrong}), "restore")
    assert history.check(Item.INVENTORY).status is Held.BROKEN


def test_a_plain_value_that_equals_neither_reference_nor_control_is_blamed() -> None:
    history = saving(lambda leaves: leaves.update({"trainer.cursor": 0}))
    history = also(history, lambda leaves: leaves.update({"trainer.cursor": 48}), "control")
    assert history.check(Item.INVENTORY).subjects == ("trainer.cursor",)


# ---------------------------------------------------------------- one key for every rank


def one_key(history: History, *came_back: Any, key: str = "loader") -> History:
    """Rank r saved the value r under one key; the ranks came back with these."""
    for rank in history.record("source").ranks:
        history = history.edited(
            "inventory",
            lambda i, r=rank: i["leaves"].update({key: r}),
            launch="source",
            rank=rank,
            step=8,
            at="save",
        )
    for rank, value in enumerate(came_back):
        history = history.edited(
            "inventory",
            lambda i, v=value: i["leaves"].update({key: v}),
            rank=rank,
            step=0,
            at="load",
        )
    return history


def test_rank_private_state_that_collapsed_to_one_copy_is_blamed() -> None:
    check = one_key(healthy("ddp2"), 0, 0).check(Item.INVENTORY)
    assert (check.status, check.subjects) == (Held.BROKEN, ("loader",))
    assert (
        "loader was saved by every rank under one key, and rank 1 came back with rank 0's"
        in check.summary
    )


@pytest.mark.parametrize(
    "came_back",
    [(0, 1), (0, 7)],
    ids=["every rank its own", "a value that no rank saved"],
)
def test_only_another_ranks_value_is_a_collapse(came_back: tuple[int, ...]) -> None:
    assert one_key(healthy("ddp2"), *came_back).check(Item.INVENTORY).status is Held.HELD


def test_ranks_that_all_saved_the_same_lose_nothing() -> None:
    history = healthy("ddp2")
    for launch, step, at in (("source", 8, "save"), ("restore", 0, "load")):
        history = history.edited(
            "inventory", lambda i: i["leaves"].update(epoch=1), launch=launch, step=step, at=at
        )
    assert history.check(Item.INVENTORY).status is Held.HELD


def test_at_another_world_size_nobody_has_a_value_of_his_own() -> None:
    assert "under one key" not in one_key(healthy("ddp2", "ddp1"), 0).check(Item.INVENTORY).summary


def test_files_of_single_ranks_cannot_collapse() -> None:
    history = one_key(healthy("ddp2"), 0, 0)
    history = history.edited("inventory", lambda i: i.update(call="torch.save"), launch="source")
    assert "under one key" not in history.check(Item.INVENTORY).summary


def test_shards_of_one_tensor_may_move_between_ranks() -> None:
    """Rank 1 asks for the part that rank 0 saved: that is resharding, not a collapse."""
    history = healthy("fsdp2")
    part = next(
        f.data["leaves"]["model.mix.weight"]
        for f in history.record("source").of("inventory", 0)
        if f.step == 8
    )
    history = history.edited(
        "inventory",
        lambda i: i["leaves"].update({"model.mix.weight": part}),
        rank=1,
        step=0,
        at="load",
    )
    assert history.check(Item.INVENTORY).status is Held.HELD


# ---------------------------------------------------------------- told through the probe


def told(history: History, launch: str, step: int, leaves: Any, rank: int = 0) -> History:
    about = {"what": "state", "name": "curriculum", "leaves": {"": leaves}}
    fact = history.fact("probe", rank, step=step, launch=launch, **about)
    return history.adding(fact, launch=launch)


def test_state_that_the_job_told_is_compared_at_the_same_step() -> None:
    history = told(told(healthy(), "source", 9, 5), "restore", 1, 0)
    verdict = history.verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.INVENTORY)
    assert "curriculum told at step 9 differs from the reference's" in verdict.explanation


def test_what_was_told_alike_or_by_one_run_only_is_no_difference() -> None:
    alike = told(told(healthy(), "source", 9, 5), "restore", 1, 5)
    for history in (alike, told(healthy(), "source", 9, 5), told(healthy(), "restore", 1, 5)):
        assert history.check(Item.INVENTORY).status is Held.HELD


def test_what_was_told_before_the_restore_is_history() -> None:
    history = told(told(healthy(), "source", 8, 5), "restore", 0, 0)
    assert history.check(Item.INVENTORY).status is Held.HELD


def test_ranks_are_taken_together_in_what_they_told() -> None:
    history = told(told(healthy("ddp2", "ddp1"), "source", 9, 5), "source", 9, 5, rank=1)
    assert told(history, "restore", 1, 5).check(Item.INVENTORY).status is Held.HELD
    assert told(history, "restore", 1, 6).check(Item.INVENTORY).status is Held.BROKEN


def test_the_last_word_of_a_step_counts() -> None:
    history = told(told(healthy(), "source", 9, 4), "source", 9, 5)
    assert told(history, "restore", 1, 5).check(Item.INVENTORY).status is Held.HELD
