"""Damage to real checkpoints: what is named is what changes, and a flipped bit loads silently.

Every test of a damage has a twin in the untouched source, loaded the same way.
"""

import os
import shutil
import warnings
from collections.abc import Callable
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


# --------------------------------------------------------------------------------------------------
# Headers, zeros, shards of other ranks and steps


def outcome(load: Callable[[], Any]) -> str:
    """What a reader makes of a checkpoint: `refused`, `whole`, or `silently another`."""
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception

    try:
        return "silently another" if differing(load()) else "whole"
    except (Exception, CheckpointException):  # noqa: BLE001 - whatever a reader refuses with
        return "refused"


def test_a_header_flip_moves_where_the_elements_are_read(form: str, checkpoint: Path) -> None:
    assert outcome(lambda: FORMATS[form][1](checkpoint)) == "whole"
    record = damage.apply(make_damage(DamageKind.HEADER_FLIP), checkpoint)
    assert (record["tensor"], record["bit"], record["fired"]) == ("model.weight", 0, True)
    assert record["element_offset"] is None
    assert outcome(lambda: FORMATS[form][1](checkpoint)) != "whole"


def test_the_header_of_a_safetensors_file_names_the_tensor(tmp_path: Path) -> None:
    header = b'{"a.weight":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(4)))
    record = damage.apply(make_damage(DamageKind.HEADER_FLIP, file="*.safetensors"), tmp_path)
    assert file.read_bytes()[8:] == header.replace(b"weight", b"weighu") + bytes(range(4))
    assert record["byte_offset"] == 8 + header.index(b't":{"d')


def test_the_header_of_anything_else_is_its_first_byte(tmp_path: Path) -> None:
    (tmp_path / "blob.bin").write_bytes(b"\x80abc")
    damage.apply(make_damage(DamageKind.HEADER_FLIP), tmp_path)
    assert (tmp_path / "blob.bin").read_bytes() == b"\x81abc"


def test_zeros_silently_replace_a_block_of_the_tensor(form: str, checkpoint: Path) -> None:
    record = damage.apply(make_damage(DamageKind.ZERO_FILL), checkpoint)
    loaded = FORMATS[form][1](checkpoint)
    assert record["fired"]
    assert differing(loaded) == {"model.weight": list(range(1501, 2112))}
    assert loaded["model.weight"].view(-1)[1501:].abs().sum() == 0


def test_a_named_file_is_zeroed_as_a_whole(form: str, checkpoint: Path) -> None:
    record = damage.apply(make_damage(DamageKind.ZERO_FILL, file="*"), checkpoint)
    path = checkpoint / record["file"] if checkpoint.is_dir() else checkpoint
    assert path.stat().st_size == record["files"][0]["size_bytes_before"]
    assert set(path.read_bytes()) == {0}
    assert outcome(lambda: FORMATS[form][1](checkpoint)) == "refused"


def save_ranks(folder: Path, seed: int = 0) -> Path:
    """What two ranks write, each its own file, and one that only the first writes."""
    torch.manual_seed(seed)
    folder.mkdir()
    for rank in range(2):
        torch.save({"model": {"w": torch.randn(500)}}, folder / f"model-rank{rank}.pt")
    torch.save({"step": 1}, folder / "trainer.pt")
    return folder


def ranks(folder: Path) -> list[bytes]:
    return [(folder / f"model-rank{rank}.pt").read_bytes() for rank in range(2)]


def test_swapped_shards_hold_what_the_other_rank_wrote(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "step-1")
    before = ranks(folder)
    record = damage.apply(make_damage(DamageKind.SWAP, tensor="model.w"), folder)
    assert (record["file"], record["other"]) == ("model-rank0.pt", "model-rank1.pt")
    assert ranks(folder) == before[::-1]
    assert sorted(file.name for file in folder.iterdir()) == [
        "model-rank0.pt", "model-rank1.pt", "trainer.pt",
    ]  # fmt: skip
    first, second = record["files"]
    assert (first["sha256_before"], first["sha256_after"]) == (
        second["sha256_after"],
        second["sha256_before"],
    )
    assert record["fired"]


def test_equal_shards_swapped_are_no_damage(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "step-1")
    shutil.copy(folder / "model-rank0.pt", folder / "model-rank1.pt")
    assert damage.apply(make_damage(DamageKind.SWAP), folder)["fired"] is False


def test_one_shard_alone_cannot_be_swapped(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="only shard of its kind"):
        damage.apply(make_damage(DamageKind.SWAP), checkpoint)


def test_a_swap_does_not_write_through_hard_links(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "step-1")
    os.link(folder / "model-rank1.pt", tmp_path / "original")
    with pytest.raises(UserError, match="hard links"):
        damage.apply(make_damage(DamageKind.SWAP), folder)


def test_a_foreign_shard_is_that_of_the_other_step(tmp_path: Path) -> None:
    folder, older = save_ranks(tmp_path / "step-8"), save_ranks(tmp_path / "step-4", seed=1)
    before = ranks(folder)
    record = damage.apply(make_damage(DamageKind.FOREIGN_SHARD, tensor="model.w"), folder, older)
    assert (record["file"], record["other"], record["fired"]) == ("model-rank0.pt", None, True)
    assert ranks(folder) == [ranks(older)[0], before[1]]
    assert ranks(older) == ranks(save_ranks(tmp_path / "again", seed=1))  # which is only read


def test_a_checkpoint_of_one_file_is_replaced_by_the_other_step(tmp_path: Path) -> None:
    newer, older = tmp_path / "ckpt-8.pt", tmp_path / "ckpt-4.pt"
    torch.save({"w": torch.ones(9)}, newer)
    torch.save({"w": torch.zeros(9)}, older)
    damage.apply(make_damage(DamageKind.FOREIGN_SHARD), newer, older)
    assert newer.read_bytes() == older.read_bytes()


def test_a_shard_that_is_the_same_in_both_steps_is_no_damage(tmp_path: Path) -> None:
    folder, older = save_ranks(tmp_path / "step-8"), save_ranks(tmp_path / "step-4")
    assert damage.apply(make_damage(DamageKind.FOREIGN_SHARD), folder, older)["fired"] is False


@pytest.mark.parametrize("gone", [True, False])
def test_another_step_without_the_file_is_an_error(tmp_path: Path, gone: bool) -> None:
    folder, older = save_ranks(tmp_path / "step-8"), save_ranks(tmp_path / "step-4")
    (older / "model-rank1.pt").unlink()
    with pytest.raises(UserError, match=r"another saved step|has no model-rank1\.pt"):
        damage.apply(make_damage(DamageKind.FOREIGN_SHARD), folder, None if gone else older)


@pytest.mark.parametrize("kind", [kind for kind in DamageKind if kind is not DamageKind.POINTER])
def test_every_kind_says_whether_it_changed_anything(tmp_path: Path, kind: DamageKind) -> None:
    """In files without content nothing can be changed; only a deletion still does something."""
    for step in ("step-8", "step-4"):
        (tmp_path / step).mkdir()
        for rank in range(2):
            (tmp_path / step / f"shard-{rank}").touch()
    record = damage.apply(make_damage(kind), tmp_path / "step-8", tmp_path / "step-4")
    assert record["fired"] is (kind is DamageKind.DELETE)
    (file, *_) = record["files"]
    assert (file["sha256_before"] != file["sha256_after"]) is record["fired"]


@pytest.mark.parametrize("parameters", [{"file": "*.gone"}, {"file": "*", "tensor": "*"}])
def test_a_file_is_named_alone_and_must_exist(checkpoint: Path, parameters: Any) -> None:
    with pytest.raises(UserError, match=r"no file of the checkpoint matches|a tensor or a file"):
        damage.apply(make_damage(DamageKind.TRUNCATE, **parameters), checkpoint)


def test_a_glob_over_files_chooses_the_victim(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "step-1")
    record = damage.apply(make_damage(DamageKind.DELETE, file="trainer.*"), folder)
    assert (record["file"], record["tensor"]) == ("trainer.pt", None)
    assert not (folder / "trainer.pt").exists()
