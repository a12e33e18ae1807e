"""`ckptdrill diff`: a line per difference with digests and sizes, and the exit code they give."""

import json
from pathlib import Path

import pytest

from ckptdrill import diffing
from ckptdrill.errors import ExitCode

torch = pytest.importorskip("torch")
samples = pytest.importorskip("tests.formats.samples")


def test_a_changed_element_a_missing_tensor_and_another_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t = samples.training()
    torch.save({"model": t.weights, "step": 3}, tmp_path / "a.pt")
    t.weights["a.weight"][1, 2] = 9.0
    del t.weights["b.bias"]
    torch.save({"model": t.weights, "step": 4}, tmp_path / "b.pt")
    code = diffing.diff(tmp_path / "a.pt", tmp_path / "b.pt", tolerance=None, as_json=False)
    assert code is ExitCode.UNSUPPORTED
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("differs      a.weight (weights)") for line in said)
    assert any("at [1, 2], relative" in line for line in said)
    assert any(line.startswith("only in A    b.bias") for line in said)
    assert "differs      step: 3 | 4" in said
    assert said[-1] == "tensors: 1 differs, 1 only in A, 2 same; values that differ: 1"


def test_other_formats_of_equal_tensors_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t = samples.training()
    a = samples.dcp_sharded(tmp_path / "a", t.weights, 3, 1)
    b = samples.safetensors(tmp_path / "b", t)
    assert diffing.diff(a, b, tolerance=None, as_json=True) is ExitCode.AS_EXPECTED
    said = json.loads(capsys.readouterr().out)
    assert [side["format"] for side in (said["a"], said["b"])] == ["dcp", "safetensors"]
    assert {row["outcome"] for row in said["tensors"]} == {"same"}
    assert said["tensors"][0]["a"]["xxh3_128"] == said["tensors"][0]["b"]["xxh3_128"]


def test_a_nan_is_an_infinite_difference_also_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("a.pt", 1.0), ("b.pt", float("nan"))):
        torch.save({"w": torch.full((2,), value)}, tmp_path / name)
    diffing.diff(tmp_path / "a.pt", tmp_path / "b.pt", tolerance=None, as_json=True)
    (row,) = json.loads(capsys.readouterr().out)["tensors"]
    assert (row["largest_absolute"], row["largest_relative"]) == ("inf", "inf")
