"""What only the resumed run is told is blamed when the state is there and the training is not."""

from typing import Any

from ckptdrill.model import Held, Item, Reason, VerdictWord
from tests.judge.history import History, healthy

TOLD = ("--dropout 0.3",)


def _another_loss(history: History) -> History:
    def edit(stepped: dict[str, Any]) -> None:
        stepped["losses"] = [loss * 1.1 for loss in stepped["losses"]]

    return history.edited("stepped", edit)


def test_an_argument_that_only_the_resumed_run_has_explains_other_updates() -> None:
    verdict = _another_loss(healthy("ddp1").given(resume_only=TOLD)).verdict()
    assert (verdict.word, verdict.reason) == (VerdictWord.UNSUPPORTED, Reason.DIVERGED)
    assert (verdict.blame_item, verdict.blame_subject) == (Item.CONFIGURATION, "--dropout 0.3")
    assert "only the resumed run is given `--dropout 0.3`" in verdict.explanation


def test_without_one_the_loss_itself_is_blamed() -> None:
    assert _another_loss(healthy("ddp1")).verdict().blame_item is Item.LOSS


def test_the_argument_alone_is_no_fault() -> None:
    history = healthy("ddp1").given(resume_only=TOLD)
    assert history.verdict().word is VerdictWord.PASS
    row = history.check(Item.CONFIGURATION)
    assert row.status is Held.HELD
    assert row.details == ("only the resumed run is given `--dropout 0.3`",)


def test_state_that_differs_is_blamed_before_an_argument() -> None:
    history = healthy("ddp1").given(resume_only=TOLD).differs("weights", "head.bias")
    assert history.verdict().blame_item is Item.WEIGHTS
