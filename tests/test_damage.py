"""Damage to real checkpoints: what is named is what changes, and a flipped bit loads silently.

Every test of a damage has a twin in the untouched source, loaded the same way.
"""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from ckptdrill import damage
from ckptdrill.errors import UserError
from ckptdrill.model import Checkpoint, Damage, DamageKind

torch = pytest.importorskip("torch")


def make_state() -> dict[str, Any]:
    """Flat keys; the largest tensor is a moment, the largest weight has zeros in its middle."""
    torch.manual_seed(0)
    weight = torch.randn(64, 33)
    weight.view(-1)[1000:1500] = 0.0
    weight.view(-1)[1500] = float("inf")
    return {
        "model.weight": weight,
        "model.bias": torch.randn(33),
        "model.half": torch.randn(40, 5).to(torch.bfloat16),
        "model.index": torch.arange(4000),
        "optimizer.state.0.exp_avg": torch.randn(100, 100),
    }


def save_dcp(folder: Path) -> Path:
    import torch.distributed.checkpoint as dist_checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist_checkpoint.save(make_state(), checkpoint_id=folder, no_dist=True)
    return folder


def load_dcp(folder: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dist_checkpoint

    state = {key: torch.zeros_like(value) for key, value in make_state().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist_checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return state


def save_file(path: Path) -> Path:
    torch.save(make_state(), path)
    return path


def load_file(path: Path) -> Any:
    return torch.load(path, weights_only=True)


FORMATS = {"dcp": (save_dcp, load_dcp), "torch.save": (save_file, load_file)}


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(form: str, tmp_path: Path) -> Path:
    return FORMATS[form][0](tmp_path / "step-1")


def make_damage(kind: DamageKind, **parameters: Any) -> Damage:
    return Damage("flip-1", kind, Checkpoint("source", 1), parameters)


def differing(loaded: dict[str, Any]) -> dict[str, list[int]]:
    """Flat indices of the elements that are not bitwise what was saved, by key."""
    found = {}
    for key, saved in make_state().items():
        as_bytes = [t.contiguous().view(torch.uint8).view(-1, t.element_size()) for t in
                    (saved.view(-1), loaded[key].reshape(-1))]  # fmt: skip
        indices = (as_bytes[0] != as_bytes[1]).any(1).nonzero().flatten().tolist()
        if indices:
            found[key] = indices
    return found


def test_an_untouched_checkpoint_differs_nowhere(form: str, checkpoint: Path) -> None:
    assert differing(FORMATS[form][1](checkpoint)) == {}


def test_a_flip_silently_changes_one_element_of_the_named_tensor(
    form: str, checkpoint: Path
) -> None:
    record = damage.apply(make_damage(DamageKind.BIT_FLIP), checkpoint)
    loaded = FORMATS[form][1](checkpoint)
    assert (record["tensor"], record["format"], record["fired"]) == ("model.weight", form, True)
    assert differing(loaded) == {"model.weight": [record["element_offset"]]}
    assert record["element_offset"] == 1501  # past the zeros and the infinity of the middle
    old = make_state()["model.weight"].view(-1)[1501]
    new = loaded["model.weight"].view(-1)[1501]
    assert 2**-7 < abs((new - old) / old).item() < 2**-4


def test_the_record_holds_the_file_before_and_after(form: str, checkpoint: Path) -> None:
    record = damage.apply(make_damage(DamageKind.BIT_FLIP), checkpoint)
    (file,) = record["files"]
    assert file["path"] == record["file"]
    assert file["size_bytes_before"] == file["size_bytes_after"]
    assert file["sha256_before"] != file["sha256_after"]
    path = checkpoint / record["file"] if checkpoint.is_dir() else checkpoint
    with path.open("r+b") as stream:  # the same bit again: the checkpoint is whole
        stream.seek(record["byte_offset"])
        old = stream.read(1)[0]
        stream.seek(record["byte_offset"])
        stream.write(bytes([old ^ 1 << record["bit"]]))
    assert differing(FORMATS[form][1](checkpoint)) == {}


@pytest.mark.parametrize(
    ("pattern", "tensor"),
    [
        ("*.bias", "model.bias"),
        ("*exp_avg", "optimizer.state.0.exp_avg"),
        ("model.half", "model.half"),
        ("model.index", "model.index"),
    ],
)
def test_a_glob_chooses_the_victim(form: str, checkpoint: Path, pattern: str, tensor: str) -> None:
    record = damage.apply(make_damage(DamageKind.BIT_FLIP, tensor=pattern), checkpoint)
    assert record["tensor"] == tensor
    assert differing(FORMATS[form][1](checkpoint)) == {tensor: [record["element_offset"]]}


def test_the_same_checkpoint_is_damaged_in_the_same_place(form: str, tmp_path: Path) -> None:
    save = FORMATS[form][0]
    first, second = (
        damage.apply(make_damage(DamageKind.BIT_FLIP), save(tmp_path / name / "step-1"))
        for name in ("a", "b")
        if not (tmp_path / name).mkdir()  # type: ignore[func-returns-value]
    )
    assert first == second


@pytest.mark.parametrize("kind", [DamageKind.TRUNCATE, DamageKind.DELETE])
def test_a_cut_or_missing_file_does_not_load(form: str, checkpoint: Path, kind: DamageKind) -> None:
    record = damage.apply(make_damage(kind), checkpoint)
    (file,) = record["files"]
    assert record["fired"]
    assert record["tensor"] == "model.weight"
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception

    half = file["size_bytes_before"] // 2
    assert file["size_bytes_after"] == (half if kind is DamageKind.TRUNCATE else None)
    with pytest.raises((Exception, CheckpointException)):
        FORMATS[form][1](checkpoint)


def test_a_glob_that_matches_nothing_names_what_there_is(checkpoint: Path) -> None:
    with pytest.raises(UserError) as caught:
        damage.apply(make_damage(DamageKind.BIT_FLIP, tensor="decoder.*"), checkpoint)
    assert "model.bias" in str(caught.value)


def test_a_copy_with_hard_links_is_not_private(form: str, checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp" if checkpoint.is_dir() else checkpoint
    original = checkpoint.parent / "original"
    os.link(file, original)
    content = original.read_bytes()
    with pytest.raises(UserError, match="hard links"):
        damage.apply(make_damage(DamageKind.BIT_FLIP), checkpoint)
    assert original.read_bytes() == content


def test_an_unknown_format_is_flipped_in_the_middle_of_its_largest_file(tmp_path: Path) -> None:
    (tmp_path / "small.bin").write_bytes(b"\0" * 10)
    (tmp_path / "large.bin").write_bytes(b"\0" * 101)
    record = damage.apply(make_damage(DamageKind.BIT_FLIP), tmp_path)
    assert (record["file"], record["tensor"], record["byte_offset"]) == ("large.bin", None, 50)
    assert (tmp_path / "large.bin").read_bytes() == b"\0" * 50 + b"\1" + b"\0" * 50
    assert record["fired"]


@pytest.mark.parametrize("kind", [DamageKind.BIT_FLIP, DamageKind.TRUNCATE])
def test_a_damage_that_changes_nothing_has_not_fired(tmp_path: Path, kind: DamageKind) -> None:
    (tmp_path / "empty.bin").touch()
    assert damage.apply(make_damage(kind), tmp_path)["fired"] is False


def test_nothing_to_damage_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to damage"):
        damage.apply(make_damage(DamageKind.DELETE), tmp_path)


def test_a_tensor_of_zeros_is_still_changed(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(9)}, tmp_path / "zeros.pt")
    record = damage.apply(make_damage(DamageKind.BIT_FLIP), tmp_path / "zeros.pt")
    assert record["element_offset"] == 4
    assert load_file(tmp_path / "zeros.pt")["w"].nonzero().flatten().tolist() == [4]


def test_of_two_shards_the_one_that_holds_the_tensor_is_hit(tmp_path: Path) -> None:
    torch.save({"optimizer": {"exp_avg": torch.randn(500)}}, tmp_path / "optimizer.pt")
    torch.save({"model": {"w": torch.randn(5)}}, tmp_path / "model.pt")
    shutil.copy(tmp_path / "optimizer.pt", tmp_path / "unlisted.bin.backup")
    record = damage.apply(make_damage(DamageKind.DELETE), tmp_path)
    assert (record["file"], record["tensor"]) == ("model.pt", "model.w")
