"""A process that compiles an extension of torch, or waits for one that does, leaves a fact."""

import pytest

from tests.observer.conftest import Observe

pytestmark = pytest.mark.e2e

SCRIPT = """
    import pathlib, threading
    from torch.utils.file_baton import FileBaton

    lock = pathlib.Path("some_extension/lock")
    lock.parent.mkdir()
    lock.touch()
    baton = FileBaton(str(lock))
    assert not baton.try_acquire()
    threading.Timer(0.2, lock.unlink).start()
    baton.wait()
    assert baton.try_acquire()
    baton.release()
"""


def test_waiting_building_and_the_end_of_both_are_facts(observe: Observe) -> None:
    observed = observe(SCRIPT)
    observed.is_whole()
    assert observed.column("extension", "does") == ["waits", "done", "builds", "done"]
    assert {lock.split("/")[-2] for lock in observed.column("extension", "lock")} == {
        "some_extension"
    }
