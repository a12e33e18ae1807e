"""What lies at a checkpoint's path when a step is over is kept, whatever is done to it later."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptdrill.observer.kept import Keeper


class Run:
    """A job that has completed `step` and saved so often."""

    def __init__(self, tmp_path: Path, *paths: tuple[int, str, bool]) -> None:
        self.out, self.into = tmp_path / "out", tmp_path / "saves"
        self.out.mkdir(parents=True)
        asked = [[step, str(self.out / name), named] for step, name, named in paths]
        keep = {"root": str(self.out), "into": str(self.into), "paths": asked}
        self.watch: Any = SimpleNamespace(recorder=SimpleNamespace(step=0), saves_begun=0)
        self.keeper = Keeper(cast("Any", self.watch), {"keep": keep, "first_step": 0})

    def step(self, number: int, **files: str) -> None:
        """Complete a step and write these files after it."""
        self.watch.recorder.step = number
        for name, text in files.items():
            path = self.out / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            self.watch.saves_begun += 1
        self.keeper.look()

    def kept(self, name: str) -> str:
        return (self.into / name).read_text()


def test_a_checkpoint_that_is_removed_later_is_kept_as_a_link(tmp_path: Path) -> None:
    run = Run(tmp_path, (4, "step4", True))
    run.step(4, step4="four")
    assert (run.into / "4/step4").stat().st_nlink == 2
    (run.out / "step4").unlink()
    run.step(8)
    assert run.kept("4/step4") == "four"


def test_a_file_that_is_written_again_is_kept_as_a_copy_of_the_wanted_step(tmp_path: Path) -> None:
    run = Run(tmp_path, (4, "last", False))
    for number in (2, 4, 6):
        run.step(number, last=f"of step {number}")
    assert run.kept("4/last") == "of step 4"
    assert not (run.into / "2").exists()


def test_what_another_rank_adds_later_is_in_it(tmp_path: Path) -> None:
    run = Run(tmp_path, (4, "step4", True))
    run.step(4, step4__rank0="a")
    run.step(5, step4__rank1="b")
    assert [run.kept(f"4/step4/rank{rank}") for rank in (0, 1)] == ["a", "b"]


@pytest.mark.parametrize("named", [True, False])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, *, named: bool) -> None:
    run = Run(tmp_path, (4, "step4", named))
    (tmp_path / "secret").write_text("secret")
    (run.out / "step4").mkdir()
    (run.out / "step4" / "link").symlink_to(tmp_path / "secret")
    run.step(4, step4__own="own")
    assert sorted(path.name for path in run.into.rglob("*") if path.is_file()) == ["own"]
    pointing = Run(tmp_path / "other", (4, "pointer", named))
    (pointing.out / "pointer").symlink_to(tmp_path / "secret")
    pointing.step(4)
    assert not pointing.into.exists()
