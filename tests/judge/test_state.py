"""What must be bitwise equal before the first update, item by item: who is blamed, and for what."""

from collections.abc import Callable
from typing import Any

import pytest

from ckptdrill.judge.logical import combine
from ckptdrill.model import Held, Item, Reason, VerdictWord
from tests.judge.history import RESTORE_STEP, History, healthy, other


def test_one_weight_that_differs_is_blamed_by_name() -> None:
    verdict = healthy("fsdp2", "ddp1").differs("weights", "mix.weight").verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert (verdict.blame_item, verdict.blame_subject) == (Item.WEIGHTS, "mix.weight")
    assert "mix.weight differs from the reference" in verdict.explanation
    assert verdict.facts
    assert verdict.next_move


def test_the_number_of_wrong_weights_is_told() -> None:
    history = healthy().differs("weights", "mix.weight").differs("weights", "embed.weight")
    check = history.check(Item.WEIGHTS)
    assert check.subjects == ("embed.weight", "mix.weight")
    assert "(and 1 more)" in check.summary
    assert check.numbers["differing"] == 2


def test_a_buffer_that_no_state_dict_holds_is_compared_too() -> None:
    verdict = healthy().differs("buffers", "positions").differs("buffers", "positions", rank=1)
    assert verdict.verdict().blame_item is Item.BUFFERS
    assert verdict.verdict().blame_subject == "positions"


@pytest.mark.parametrize("part", ["weights", "buffers"])
def test_a_name_that_is_gone_is_a_broken_key(part: str) -> None:
    name = {"weights": "head.bias", "buffers": "positions"}[part]
    verdict = healthy().loses(part, name).verdict()
    assert (verdict.blame_item, verdict.blame_subject) == (Item.KEYS, name)
    assert "missing after the restore" in verdict.explanation


def test_a_name_that_is_new_is_a_broken_key() -> None:
    def wrap(state: dict[str, Any]) -> None:
        state["weights"]["module.head.bias"] = state["weights"]["head.bias"]

    assert healthy().state(wrap).verdict().blame_subject == "module.head.bias"


@pytest.mark.parametrize(("place", "value", "word"), [(0, "bfloat16", "dtype"), (1, [7], "shape")])
def test_another_dtype_or_shape_is_a_broken_key(place: int, value: object, word: str) -> None:
    def cast(state: dict[str, Any]) -> None:
        state["weights"]["head.bias"][place] = value

    check = healthy().state(cast).check(Item.KEYS)
    assert check.status is Held.BROKEN
    assert word in check.summary


def test_lost_moments_show_as_a_fresh_optimizer() -> None:
    verdict = healthy("fsdp2", "fsdp4").loses("optimizer").verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.MOMENTS)
    assert "a fresh optimizer" in verdict.explanation


def test_a_moment_that_one_parameter_lost_is_blamed() -> None:
    verdict = healthy().loses("optimizer", "mix.weight.exp_avg_sq").verdict()
    assert verdict.blame_subject == "mix.weight.exp_avg_sq"
    assert "a fresh optimizer" not in verdict.explanation


def test_a_rank_that_holds_nothing_of_a_parameter_needs_no_moment_of_it() -> None:
    """As a flat partition leaves it: the part of rank 1 lies on rank 0."""

    def nothing(state: dict[str, Any]) -> None:
        state["optimizer"].pop("head.bias.exp_avg")
        state["weights"]["head.bias"][2:] = [[0], [0], "0" * 32]

    def lost(state: dict[str, Any]) -> None:
        state["optimizer"].pop("head.bias.exp_avg")

    said = healthy("ddp2").state(lost, rank=1).check(Item.MOMENTS)
    assert said.summary.startswith("head.bias.exp_avg is missing on rank 1")
    assert healthy("ddp2").state(nothing, rank=1).check(Item.MOMENTS).status is Held.HELD


def test_moments_of_two_parameters_that_changed_places_are_both_blamed() -> None:
    def swap(state: dict[str, Any]) -> None:
        moments = state["optimizer"]
        one, two = moments["mix.weight.exp_avg"], moments["embed.weight.exp_avg"]
        one[4], two[4] = two[4], one[4]

    verdict = healthy().state(swap).verdict()
    check = next(c for c in verdict.checks if c.item is Item.MOMENTS)
    assert verdict.blame_item is Item.MOMENTS
    assert check.subjects == ("embed.weight.exp_avg", "mix.weight.exp_avg")


def test_the_step_count_inside_the_optimizer_is_shown_as_a_number() -> None:
    def reset(state: dict[str, Any]) -> None:
        state["optimizer"]["mix.weight.step"] = 0.0

    check = healthy().state(reset).check(Item.MOMENTS)
    assert check.details[0] == "mix.weight.step is 0.0, the reference has 8.0"


@pytest.mark.parametrize(
    ("key", "value"), [("weight_decay", 0.0), ("betas", [0.9, 0.999]), ("eps", 1e-6)]
)
def test_a_hyper_parameter_that_changed_is_blamed(key: str, value: object) -> None:
    def change(state: dict[str, Any]) -> None:
        state["groups"][0][0]["hyper"][key] = value

    verdict = healthy("fsdp2", "fsdp4").state(change).verdict()
    assert verdict.blame_item is Item.HYPERPARAMETERS
    assert verdict.blame_subject is not None
    assert verdict.blame_subject.startswith(f"param_groups[0].{key}")


def test_a_hyper_parameter_that_changed_on_a_later_rank_only_is_blamed() -> None:
    def change(state: dict[str, Any]) -> None:
        state["groups"][0][0]["hyper"]["weight_decay"] = 0.0

    verdict = healthy("fsdp2", "fsdp4").state(change, rank=3).verdict()
    assert verdict.blame_item is Item.HYPERPARAMETERS
    assert "(rank 3)" in verdict.explanation


def test_a_parameter_that_changed_its_group_is_blamed() -> None:
    def move(state: dict[str, Any]) -> None:
        state["groups"][0][0]["members"].remove("head.bias")

    check = healthy().state(move).check(Item.HYPERPARAMETERS)
    assert check.status is Held.BROKEN
    assert "head.bias" in check.summary


def test_a_group_that_is_gone_is_blamed() -> None:
    def drop(state: dict[str, Any]) -> None:
        state["groups"][0].clear()

    check = healthy().state(drop).check(Item.HYPERPARAMETERS)
    assert check.status is Held.BROKEN
    assert "parameter groups: 1 in the source, 0 after" in check.summary


def test_a_job_without_an_optimizer_proves_no_hyper_parameter() -> None:
    def none(state: dict[str, Any]) -> None:
        state["groups"] = []

    history = healthy().state(none).state(none, launch="source")
    assert history.check(Item.HYPERPARAMETERS).status is Held.NOT_OBSERVED


@pytest.mark.parametrize("rank", [None, 1])
def test_a_loss_scaler_that_starts_again_is_blamed(rank: int | None) -> None:
    def reset(state: dict[str, Any]) -> None:
        state["scalers"][0]["scale"] = 2.0

    verdict = healthy().state(reset, rank=rank).verdict()
    assert verdict.blame_item is Item.PRECISION
    assert "scale is 2.0, the reference has 262144.0" in verdict.explanation


def test_a_job_without_a_loss_scaler_has_nothing_to_lose() -> None:
    def none(state: dict[str, Any]) -> None:
        state["scalers"] = []

    history = healthy().state(none).state(none, launch="source")
    assert history.verdict().word is VerdictWord.PASS


def test_replicas_that_differ_are_a_finding_of_their_own() -> None:
    check = healthy("ddp2").differs("weights", "embed.weight", rank=1).check(Item.WEIGHTS)
    assert check.status is Held.BROKEN
    assert "ranks hold different values" in check.summary


def test_state_that_each_rank_holds_for_itself_must_come_back_on_its_rank() -> None:
    def private(state: dict[str, Any]) -> None:
        state["buffers"]["positions"] = other(state["buffers"]["positions"])

    apart = healthy("ddp2").state(private, launch="source", rank=1)
    assert apart.state(private, rank=1).verdict().word is VerdictWord.PASS
    check = apart.state(private, rank=0).check(Item.BUFFERS)
    assert check.subjects == ("positions", "positions")
    assert "on rank 0 differs" in check.summary


def test_private_replicas_do_not_hide_another_shard_that_differs() -> None:
    """Four ranks, two shards of two replicas: one place is private, the other is plainly wrong."""

    def change(state: dict[str, Any]) -> None:
        state["weights"]["mix.weight"] = other(state["weights"]["mix.weight"])

    private = healthy("ddp2fsdp2").state(change, launch="source", rank=2).state(change, rank=2)
    assert private.check(Item.WEIGHTS).status is Held.HELD
    wrong = private.state(change, rank=1).state(change, rank=3)
    assert wrong.check(Item.WEIGHTS).status is Held.BROKEN


@pytest.mark.parametrize(
    "layouts", [("fsdp2tp2", "ddp1"), ("ddp4", "fsdp3"), ("fsdp4tp2", "ddp2fsdp2"), ("ddp2", "tp2")]
)
def test_the_layout_does_not_change_a_logical_tensor(layouts: tuple[str, str]) -> None:
    history = healthy(*layouts)
    source = history.record("source").of("state")
    target = history.record("restore").of("state")
    at_save = [f for f in source if f.step == RESTORE_STEP and f.data["at"] == "forward"]
    at_start = [f for f in target if f.step == 0]
    for part in ("weights", "buffers", "optimizer"):
        assert combine(at_save, part) == combine(at_start, part)


def test_a_shard_that_no_rank_recorded_is_unknown_not_different() -> None:
    def shorten(state: dict[str, Any]) -> None:
        state["weights"]["mix.weight"][3][0] = 0

    verdict = healthy("fsdp2", "fsdp4").state(shorten, rank=1).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.EVIDENCE_MISSING)
    assert (verdict.blame_item, verdict.blame_subject) == (Item.WEIGHTS, "mix.weight")


def test_a_partial_sum_is_unknown_not_different() -> None:
    def partial(state: dict[str, Any]) -> None:
        state["weights"]["mix.weight"][2] = ["partial", 0, 0]

    verdict = healthy().state(partial).verdict()
    assert (verdict.reason, verdict.blame_subject) == (Reason.EVIDENCE_MISSING, "mix.weight")


def test_a_tensor_that_could_not_be_digested_proves_nothing() -> None:
    def sparse(state: dict[str, Any]) -> None:
        state["optimizer"]["mix.weight.exp_avg"] = "<not digested: sparse>"

    verdict = healthy().state(sparse).state(sparse, launch="source").verdict()
    assert verdict.reason is Reason.EVIDENCE_MISSING
    assert verdict.blame_subject == "mix.weight.exp_avg"


def test_what_differs_outranks_what_is_unknown() -> None:
    def partial(state: dict[str, Any]) -> None:
        state["weights"]["embed.weight"][2] = ["partial", 0, 0]

    verdict = healthy().state(partial).differs("weights", "mix.weight").verdict()
    assert (verdict.reason, verdict.blame_subject) == (Reason.DIVERGED, "mix.weight")


def test_an_optimizer_that_never_steps_is_left_out_whatever_names_have_in_them() -> None:
    """A bare module is named by its class: `Sequential:0.weight`."""

    def beside(step: float) -> Callable[[dict[str, Any]], None]:
        def edit(state: dict[str, Any]) -> None:
            entries = {f"Sequential:{name}": value for name, value in state["optimizer"].items()}
            state["optimizer"] = {**entries, "optimizer1:Sequential:0.weight.step": step}
            state["groups"] = [*state["groups"], [{"members": [], "hyper": {"lr": 0.5}}]]

        return edit

    history = healthy().state(beside(3.0), launch="source")
    assert history.state(beside(4.0)).check(Item.MOMENTS).status is Held.HELD
    lost = history.differs("optimizer", "mix.weight.exp_avg").state(beside(3.0))
    assert lost.check(Item.MOMENTS).subjects == ("Sequential:mix.weight.exp_avg",)


def test_one_group_is_told_as_one() -> None:
    assert healthy().check(Item.HYPERPARAMETERS).summary == "1 group equal"


def _frozen(launch: str, *names: str) -> History:
    return healthy("fsdp2", "ddp1").edited(
        "roots", lambda roots: roots.update(frozen=list(names)), launch=launch
    )


def test_a_parameter_that_is_frozen_after_the_restore_is_blamed_by_name() -> None:
    check = _frozen("restore", "mix.weight").check(Item.HYPERPARAMETERS)
    assert (check.status, check.subjects) == (Held.BROKEN, ("mix.weight",))
    assert check.summary == "mix.weight is frozen after the restore, the reference trains it"


def test_a_parameter_that_is_no_longer_frozen_is_blamed_too() -> None:
    summary = _frozen("source", "mix.weight").check(Item.HYPERPARAMETERS).summary
    assert summary == "mix.weight is trained after the restore, the reference keeps it frozen"


def test_what_is_frozen_in_other_models_is_their_own_matter() -> None:
    check = _frozen("restore", "Teacher:mix.weight").check(Item.HYPERPARAMETERS)
    assert check.status is Held.HELD
