"""Which saves of a launch are the checkpoint under drill."""

import pytest

from ckptdrill.judge.trajectory import local_step_of_save
from ckptdrill.model import Fact, LaunchRecord


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
