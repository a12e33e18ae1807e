"""Data order: what is missing, repeated, foreign or re-ordered, and what a topology alone does."""

from typing import Any

import pytest
from msgspec import structs

from ckptdrill.model import Held, Item, Policy, Reason, RngPolicy, VerdictWord
from tests.judge.history import History, healthy
from tests.judge.training import Layout, Training, topology

RNG = RngPolicy.NOT_GUARANTEED


def consuming(edit: Any, **where: Any) -> History:
    """What the restored run consumes in its steps, changed."""
    return healthy().edited("batch", lambda batch: edit(batch["rows"]), **where)


def broken(history: History) -> str:
    verdict = history.verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert verdict.blame_item is Item.DATA
    return verdict.explanation


def test_samples_that_were_skipped_are_missing_and_others_foreign() -> None:
    summary = broken(consuming(lambda rows: rows.__setitem__(0, "f" * 16), rank=0, step=2))
    assert "from step 11: 1 samples of the window are missing" in summary
    assert "1 samples are not those of the reference" in summary
    assert "repeated" not in summary


def test_a_loader_that_starts_again_repeats_what_was_trained() -> None:
    job = Training()

    def restart(history: History) -> History:
        for step in range(5):
            for rank in range(2):
                rows = job.rows(step + 1, Layout(topology("fsdp2"), rank))
                history = history.edited(
                    "batch", lambda b, r=rows: b.update(rows=r), rank=rank, step=step
                )
        return history

    history = restart(healthy(policy=Policy(out_of_scope={"epoch boundary": "one epoch"})))
    check = history.check(Item.DATA)
    assert check.status is Held.BROKEN
    assert "already trained are repeated" in check.summary
    assert any("restarts" in line for line in check.details)
    assert check.numbers["trained_twice"] > 0


def test_the_same_samples_in_another_order_are_called_that() -> None:
    history = healthy(
        job=Training(epochs=False), policy=Policy(out_of_scope={"epoch boundary": ""})
    )
    rows = [
        {f.rank: f.data["rows"] for f in history.record("restore").of("batch") if f.step == step}
        for step in (1, 2)
    ]
    for step, taken in ((1, rows[1]), (2, rows[0])):
        for rank in (0, 1):
            history = history.edited(
                "batch", lambda b, r=taken[rank]: b.update(rows=r), rank=rank, step=step
            )
    assert "the same samples come in another order" in broken(history)


def test_ranks_may_change_places_within_a_global_step() -> None:
    history = healthy()
    rows = {f.rank: f.data["rows"] for f in history.record("restore").of("batch") if f.step == 0}
    for rank in (0, 1):
        taken = rows[1 - rank]
        history = history.edited("batch", lambda b, r=taken: b.update(rows=r), rank=rank, step=0)
    assert history.check(Item.DATA).status is Held.HELD


def test_a_batch_without_rows_is_not_observed() -> None:
    verdict = consuming(lambda rows: rows.clear()).verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.EVIDENCE_MISSING, Item.DATA)


@pytest.mark.parametrize("layouts", [("ddp2", "ddp2tp2"), ("ddp2tp2", "ddp1"), ("ddp1", "tp4")])
def test_ranks_that_see_the_same_rows_by_design_count_once(layouts: tuple[str, str]) -> None:
    check = healthy(*layouts).check(Item.DATA)
    assert check.status is Held.HELD
    assert check.summary.startswith("40 samples over 5 steps")


# ---------------------------------------------------------------- the batch plan of a topology


def test_three_ranks_that_drop_samples_are_a_batch_plan_not_a_divergence() -> None:
    verdict = healthy("ddp2", "ddp3").verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.BATCH_PLAN)
    assert verdict.blame_subject == "batch plan"
    assert "6 samples a step instead of 8 (an uninterrupted run at ddp3" in verdict.explanation


def test_uneven_shares_weigh_samples_unequally_and_are_a_batch_plan() -> None:
    job = Training(shares="uneven")
    history = healthy("ddp2", "ddp3", job=job)
    assert history.check(Item.DATA).status is Held.HELD
    narrow = history.evidence.tolerance.__class__(loss=1e-7)
    verdict = history.given(tolerance=narrow).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.BATCH_PLAN)
    assert "(3, 3, 2) rows" in verdict.explanation


def test_a_batch_plan_does_not_excuse_other_state() -> None:
    verdict = healthy("ddp2", "ddp3").loses("optimizer").verdict()
    assert (verdict.reason, verdict.blame_item) == (Reason.DIVERGED, Item.MOMENTS)


def test_a_restore_that_differs_from_its_control_is_no_batch_plan() -> None:
    history = healthy("ddp2", "ddp3").edited(
        "batch", lambda b: b["rows"].__setitem__(0, "0" * 16), step=0, rank=0
    )
    assert history.verdict().reason is Reason.DIVERGED


# ---------------------------------------------------------------- epochs


def test_a_save_in_the_first_epoch_exercises_no_epoch() -> None:
    verdict = healthy(job=Training(epochs=False)).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNPROVEN, Reason.NOT_EXERCISED)
    assert (verdict.blame_item, "first epoch" in verdict.explanation) == (Item.DATA, True)
    assert "second epoch" in verdict.next_move


def test_a_window_that_reaches_no_new_epoch_exercises_none() -> None:
    check = healthy().given(window=3).check(Item.DATA)
    assert check.status is Held.NOT_EXERCISED
    assert "before the next epoch begins" in check.summary


def test_epochs_may_be_declared_out_of_scope() -> None:
    policy = Policy(rng_other_world_size=RNG, out_of_scope={"epoch boundary": "one epoch only"})
    assert healthy(job=Training(epochs=False), policy=policy).verdict().word is VerdictWord.PASS


# ---------------------------------------------------------------- samples in another form


def reshaped(history: History, edit: Any) -> History:
    """The rows of the target in another form, in its uninterrupted run and in the restored one."""
    return history.edited("batch", edit, launch="control").edited("batch", edit)


def hashed(rows: list[str], salt: str) -> list[str]:
    return [row[:-2] + salt for row in rows]


def unlike(batch: dict[str, Any]) -> None:
    batch["rows"] = hashed(batch["rows"], "zz")


def test_a_row_is_known_without_its_padding() -> None:
    def padded(batch: dict[str, Any]) -> None:
        batch["shorter"] = [[row] for row in batch["rows"]]
        batch["rows"] = hashed(batch["rows"], "zz")

    check = reshaped(healthy("ddp2", "ddp4"), padded).check(Item.DATA)
    assert check.status is Held.HELD
    assert check.summary.endswith("but for the padding at their ends")


def test_rows_in_another_form_are_known_by_their_effect() -> None:
    history = reshaped(healthy("ddp2", "ddp4"), unlike)
    check = history.check(Item.DATA)
    assert check.status is Held.HELD
    assert "another form at this topology" in check.summary
    assert history.verdict().word is VerdictWord.PASS


def test_an_effect_that_is_not_the_same_tells_nothing_of_unknown_rows() -> None:
    history = reshaped(healthy("ddp2", "ddp4", control=Training(gradient_factor=2.0)), unlike)
    assert history.check(Item.DATA).status is Held.NOT_OBSERVED
    assert history.verdict().word is VerdictWord.UNPROVEN


def test_rows_that_are_not_those_of_the_control_are_no_other_form() -> None:
    history = healthy("ddp2", "ddp4").edited("batch", unlike)
    assert history.check(Item.DATA).status is Held.BROKEN


def test_ranks_that_hold_the_same_samples_count_once_where_the_gradient_says_so() -> None:
    def twice(batch: dict[str, Any]) -> None:
        batch["rows"] = batch["rows"] * 2

    history = reshaped(healthy("ddp2", "ddp4"), twice)
    check = history.check(Item.DATA)
    assert check.status is Held.HELD
    assert "each on several ranks" in check.summary


def test_more_rows_of_the_same_shape_are_another_batch_plan_whatever_is_in_them() -> None:
    def more(batch: dict[str, Any]) -> None:
        batch["rows"] = hashed(batch["rows"], "yy") + hashed(batch["rows"], "zz")

    def shaped(batch: dict[str, Any]) -> None:
        batch["shapes"] = [[7]]

    history = reshaped(healthy("ddp2", "ddp4", control=Training(gradient_factor=1.3)), more)
    for launch in ("source", "control", "restore"):
        history = history.edited("batch", shaped, launch=launch)
    verdict = history.verdict()
    assert verdict.reason is Reason.BATCH_PLAN
    assert "16 samples a step instead of 8" in verdict.explanation


def test_what_is_given_again_at_every_step_is_no_sample() -> None:
    history = healthy("ddp2", "ddp4")
    for launch in ("source", "baseline", "control", "restore", "repeat"):
        record = history.record(launch)
        positions = [
            structs.replace(
                fact,
                data={**fact.data, "rows": ["a" * 16] * (fact.rank + 3), "called": 1},
                line=fact.line + 5000,
            )
            for fact in record.of("batch")
        ]
        tokens = [
            structs.replace(f, data={**f.data, "called": 0}) if f.kind == "batch" else f
            for f in record.facts
        ]
        history = history.with_facts(launch, [*tokens, *positions])
    assert history.check(Item.DATA).status is Held.HELD


def test_activations_of_later_stages_are_no_samples() -> None:
    def stage(batch: dict[str, Any]) -> None:
        batch["activations"] = hashed(batch["rows"], "xx")
        batch["rows"] = []

    history = healthy("ddp2")
    for launch in ("source", "baseline", "repeat", "restore"):
        history = history.edited("batch", stage, launch=launch, rank=1)
    assert history.check(Item.DATA).status is Held.HELD
