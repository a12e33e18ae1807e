"""The torch.save reader against files that torch itself wrote."""

import argparse
import collections
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.errors import UserError
from ckptdrill.formats import pickles, torch_save

torch = pytest.importorskip("torch")


def raw(path: Path, key: str) -> bytes:
    (chunk,) = torch_save.read(path)[key].chunks
    return path.read_bytes()[chunk.offset_bytes : chunk.offset_bytes + chunk.length_bytes]


def test_keys_are_dotted_and_ranges_are_the_raw_bytes(
    torch_save_source: Path, state: dict[str, Any]
) -> None:
    found = torch_save.read(torch_save_source)
    assert found["model.0.weight"].shape == (16, 8)
    assert "optimizer.state.0.exp_avg" in found
    for key, value in state["model"].items():
        assert raw(torch_save_source, f"model.{key}") == value.numpy().tobytes()


def test_containers_parameters_and_views(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    content = {
        "list": [torch.ones(1), (torch.zeros(2),)],
        "ordered": collections.OrderedDict(p=torch.nn.Parameter(torch.ones(3))),
        "args": argparse.Namespace(lr=0.1, scale=torch.ones(4)),
        "view": base[2:5],
        "transposed": base.view(3, 4).t(),
        "strided": base[::2],
        "half": torch.ones(2, dtype=torch.bfloat16),
        "rng": torch.get_rng_state(),
        0: torch.ones(5),
    }
    torch.save(content, tmp_path / "a.pt")
    found = torch_save.read(tmp_path / "a.pt")
    assert {"list.0", "list.1.0", "ordered.p", "args.scale", "0", "rng"} <= set(found)
    assert raw(tmp_path / "a.pt", "view") == base[2:5].numpy().tobytes()
    assert raw(tmp_path / "a.pt", "transposed") == base.numpy().tobytes()
    assert found["strided"].chunks == ()
    assert found["half"].dtype == "bfloat16"


def test_a_legacy_file_is_read_as_well(tmp_path: Path, state: dict[str, Any]) -> None:
    path = tmp_path / "old.pt"
    shared = torch.arange(6, dtype=torch.bfloat16)
    content = {**state, "views": [shared, shared[2:4]]}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert torch_save.is_torch_save(path.read_bytes()[:256])
    for key, value in state["model"].items():
        assert raw(path, f"model.{key}") == value.numpy().tobytes()
    assert raw(path, "views.1") == raw(path, "views.0")[4:8]


@pytest.mark.parametrize("kept", [0.01, 0.3, 0.9, 0.999])
def test_a_truncated_legacy_file_is_refused(
    tmp_path: Path, state: dict[str, Any], kept: float
) -> None:
    path = tmp_path / "old.pt"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(UserError):
        torch_save.read(path)


def test_a_pickled_module_is_refused_by_the_name_of_its_class(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(pickles.Refused, match=r"torch\.nn\.modules\.linear\.Linear"):
        torch_save.read(tmp_path / "module.pt")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused(torch_save_source: Path, tmp_path: Path, kept: float) -> None:
    content = torch_save_source.read_bytes()
    path = tmp_path / "cut.pt"
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(UserError):
        torch_save.read(path)


def test_containers_that_hold_each_other_are_refused() -> None:
    deep = b"]" + b"q\0" + b"h\0a"  # a list that holds itself
    with pytest.raises(pickles.Refused, match="more than any checkpoint"):
        list(torch_save._Walk().below(pickles.load(deep + b".", "here")))
    wide = b"]q\0" + b"](h\0h\0eq\0" * 60 + b"."  # 2**60 paths
    with pytest.raises(pickles.Refused, match="more than any checkpoint"):
        list(torch_save._Walk().below(pickles.load(wide, "here")))
