"""A run goes on until the save under drill has come, when the job counts in steps of its own."""

from pathlib import Path
from typing import Any

import pytest

from ckptdrill.observer.window import Window
from ckptdrill.placeholders import saved_to
from tests.observer.test_observer_loops import COMMON


def asked(folder: Path, stop_step: int = 8) -> dict[str, Any]:
    own = "|".join(saved_to(f"epoch{n}.pt") for n in (1, 2, 3))
    window = {"wanted": saved_to("epoch2.pt"), "own": own, "steps": 5}
    return {"folder": str(folder), "stop_step": stop_step, "window": window}


def test_the_wanted_save_says_to_every_rank_where_the_window_ends(tmp_path: Path) -> None:
    one, other = Window(asked(tmp_path)), Window(asked(tmp_path))
    one.saving("/out/epoch1.pt", 12)
    assert other.until() is None
    assert other.saved_at(12)
    one.saving("/out/.epoch2.pt.tmp", 24)
    one.saving("/out/epoch2.pt", 25)  # the first mark decides
    assert other.until() == 29
    assert not other.saved_at(13)


@pytest.mark.parametrize(
    ("paths", "step", "in_vain"),
    [
        ((), 8, False),
        ((), 160, True),
        (("/out/step-8",), 8, True),
        (("/out/step-8", "/out/epoch1.pt"), 8, False),
        (("/out/epoch10.pt",), 8, True),
    ],
)
def test_a_save_is_waited_for_unless_the_job_saves_elsewhere(
    paths: tuple[str, ...], step: int, tmp_path: Path, *, in_vain: bool
) -> None:
    window = Window(asked(tmp_path))
    for path in paths:
        window.saving(path, 3)
    assert window.waits_in_vain(step) is in_vain


EPOCHS = (
    COMMON
    + """
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1, 50):
        for first in range(0, 20, 4):
            optimizer.zero_grad()
            F.mse_loss(model(DATA[first:first + 4]), TARGET[first:first + 4]).backward()
            optimizer.step()
        torch.save({"epoch": epoch}, f"{PATH}/epoch{epoch}.pt")
"""
)


@pytest.mark.e2e
def test_a_job_that_saves_by_epochs_is_followed_to_the_end_of_its_window(
    observe: Any, tmp_path: Path
) -> None:
    window = asked(tmp_path)["window"]
    text = EPOCHS.replace("{PATH}", str(tmp_path))
    observed = observe(text, stop_step=4, window=window)
    assert observed.column("until", "last_step") == [15]
    assert observed.column("stopped", "step") == [15]
    sampled = {fact["step"] for fact in observed.facts("state") if fact["at"] == "forward"}
    assert {5, 6, 10, 11, 14, 15} <= sampled
