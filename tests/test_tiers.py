"""The folders of a memory tier: a private copy for each restore, with just what is said lost."""

import json
from pathlib import Path

import pytest

from ckptdrill import tiers
from ckptdrill.errors import UserError
from ckptdrill.model import MemoryTier, Tier, TierLoss
from ckptdrill.store import RunFolder, sha256_of


@pytest.fixture
def declared(tmp_path: Path) -> MemoryTier:
    (tmp_path / "memory").mkdir()
    return MemoryTier(str(tmp_path / "memory"), (6, 10), "**/rank{rank}.pt")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def written(declared: MemoryTier, run: RunFolder) -> Path:
    """What two ranks left in the tier of the launch `failing`."""
    tiers.give(declared, run, "failing", None)
    folder = tiers.folder(declared, run, "failing")
    for rank in (0, 1):
        path = folder / "step-10" / f"rank{rank}.pt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"state of {rank}")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("loss", "left"),
    [
        (None, ["step-10/rank0.pt", "step-10/rank1.pt"]),
        (TierLoss.STALE, ["step-10/rank0.pt", "step-10/rank1.pt"]),
        (TierLoss.ONE_RANK, ["step-10/rank0.pt"]),
        (TierLoss.ALL, []),
    ],
)
def test_each_loss(
    declared: MemoryTier, run: RunFolder, loss: TierLoss | None, left: list[str]
) -> None:
    source = written(declared, run)
    seal = sha256_of(source / "step-10/rank1.pt")
    rank = 1 if loss is TierLoss.ONE_RANK else None
    record = tiers.give(declared, run, "restore", Tier("failing", loss, rank))
    assert names(tiers.folder(declared, run, "restore")) == left
    assert names(tiers.left_for(run, "restore")) == left
    assert names(source) == ["step-10/rank0.pt", "step-10/rank1.pt"]  # what was left stays
    gone = [entry[0] for entry in record["removed"]]
    assert sorted([*gone, *left]) == ["step-10/rank0.pt", "step-10/rank1.pt"]
    assert [entry for entry in record["removed"] if "rank1" in entry[0]] in (
        [],
        [["step-10/rank1.pt", 10, seal]],
    )
    json.dumps(record)


def test_a_pattern_that_matches_nothing_removes_nothing(
    declared: MemoryTier, run: RunFolder
) -> None:
    written(declared, run)
    record = tiers.give(declared, run, "restore", Tier("failing", TierLoss.ONE_RANK, 7))
    assert record["removed"] == []


def test_a_launch_without_a_tier_of_another_finds_an_empty_one(
    declared: MemoryTier, run: RunFolder
) -> None:
    assert tiers.give(declared, run, "source", None) == {}
    assert tiers.folder(declared, run, "source").is_dir()


def test_a_tier_that_is_gone_is_said_to_be(declared: MemoryTier, run: RunFolder) -> None:
    with pytest.raises(UserError, match="failing left nothing in its memory tier"):
        tiers.give(declared, run, "restore", Tier("failing"))


def test_memory_is_given_back(declared: MemoryTier, run: RunFolder) -> None:
    folder = written(declared, run)
    tiers.give(declared, run, "other", None)
    tiers.remove(declared, run, "failing")
    assert not folder.exists()
    assert tiers.root(declared, run).is_dir()
    tiers.remove(declared, run)
    assert list(Path(declared.base).iterdir()) == []
    tiers.remove(None, run)


def test_two_runs_do_not_share_a_folder(declared: MemoryTier, tmp_path: Path) -> None:
    one, other = (tiers.root(declared, RunFolder(tmp_path / name)) for name in ("a", "b"))
    assert one != other
