"""Which saves of a launch are the checkpoint under drill."""

import pytest

from ckptdrill.judge.trajectory import local_step_of_save, trajectory
from ckptdrill.model import Fact, LaunchRecord


def test_a_batch_belongs_to_the_step_of_the_optimizer_that_steps_next() -> None:
    """Of two that have a backward call each the first closes the step, whenever a run began."""
    kinds = [("batch", 0), ("stepped", 1), ("batch", 1), ("stepped", 1)]  # the first step
    kinds += [("batch", 1), ("stepped", 2), ("batch", 2), ("stepped", 2), ("batch", 2)]
    facts = [
        Fact(kind, rank, step, {"rows": [f"{rank}.{line}"], "optimizer": 0}, line)
        for rank in (0, 1)
        for line, (kind, step) in enumerate(kinds)
    ]
    run = trajectory(LaunchRecord.made_of("source.two", facts, None, 2), 8)
    rows = {step: [fact.data["rows"][0] for fact in run.batches[step]] for step in run.batches}
    assert rows == {
        9: ["0.0", "0.2", "1.0", "1.2"],
        10: ["0.4", "0.6", "1.4", "1.6"],
        11: ["0.8", "1.8"],  # no optimizer has stepped after it
    }


@pytest.mark.parametrize(
    ("path", "is_it"),
    [
        ("/out/step-8", True),
        ("/out/step-8/__0_0.distcp", True),
        ("/out/.step-8", True),
        ("/out/step-8.tmp", True),
        ("/out/tmp-step-8/model.pt", True),
        ("/out/step-80", False),
        ("/out/my-step-8", False),
        ("/out/step-4", False),
    ],
)
def test_a_save_is_recognised_under_the_name_that_it_has_before_it_is_whole(
    path: str, is_it: bool
) -> None:
    fact = Fact("save_begin", 0, 8, {"path": path}, 1)
    record = LaunchRecord.made_of("source.one", (fact,), None, 1)
    assert local_step_of_save(record, "step-8") == (8 if is_it else None)
