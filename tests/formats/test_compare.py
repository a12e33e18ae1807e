"""Logical tensors are compared across formats and layouts, and every difference is found."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptdrill.errors import UserError
from ckptdrill.formats import compare, stacks
from ckptdrill.formats.compare import EQUAL, Outcome, Row

torch = pytest.importorskip("torch")
samples = pytest.importorskip("tests.formats.samples")

Rows = dict[tuple[str, str], Row]


def rows(a: Path, b: Path, tolerance: float | None = None) -> Rows:
    found = compare.tensors(stacks.read(a), stacks.read(b), tolerance)
    return {(row.what, row.name): row for row in found}


@pytest.fixture
def t() -> Any:
    return samples.training()


@pytest.mark.parametrize("name", [name for name in samples.ALL if not name.startswith("orbax")])
def test_a_checkpoint_equals_one_of_the_same_numbers_and_no_other(
    name: str, tmp_path: Path
) -> None:
    a, b = samples.write(tmp_path / "a", name), samples.write(tmp_path / "b", name)
    other = samples.write(tmp_path / "c", name, seed=1)
    same = rows(a, b)
    assert {row.outcome for row in same.values()} == {Outcome.SAME}
    assert len(same) >= len(samples.SHAPES)
    assert Outcome.DIFFERS in {row.outcome for row in rows(a, other).values()}


WEIGHTS = {("weights", name) for name in samples.SHAPES}
MOMENTS = {(m, name) for m in ("exp_avg", "exp_avg_sq") for name in samples.SHAPES}
STACKS: dict[str, Callable[[Path, Any], Path]] = {
    "torch.save": samples.torch_zip,
    "legacy": samples.torch_legacy,
    "safetensors": samples.safetensors,
    "hf": samples.hf_trainer,
    "lightning": samples.lightning,
    "universal": samples.universal,
    "zero 1, 3 ranks": lambda p, t: samples.deepspeed(p, t, 1, 3),
    "zero 2, 2 ranks": lambda p, t: samples.deepspeed(p, t, 2, 2),
    "zero 3, 2 ranks": lambda p, t: samples.deepspeed(p, t, 3, 2),
    "zero 3, 4 ranks": lambda p, t: samples.deepspeed(p, t, 3, 4),
    "megatron": samples.megatron,
    "torchtitan": samples.torchtitan,
    "bytecheckpoint": samples.bytecheckpoint,
    "dcp on 3 ranks": lambda p, t: samples.dcp_sharded(p, t.weights, 3, 1),
}


@pytest.mark.parametrize("stack", STACKS)
def test_the_weights_are_those_of_a_plain_dcp_checkpoint(
    stack: str, t: Any, tmp_path: Path
) -> None:
    plain = samples.dcp_job(tmp_path / "plain", t)
    found = rows(plain, STACKS[stack](tmp_path / "other", t))
    assert {found[key].outcome for key in WEIGHTS} == {Outcome.SAME}


@pytest.mark.parametrize("stack", sorted({*STACKS} - {"safetensors", "dcp on 3 ranks"}))
def test_and_so_are_the_moments_also_where_torch_numbers_them(
    stack: str, t: Any, tmp_path: Path
) -> None:
    plain = samples.dcp_job(tmp_path / "plain", t)
    found = rows(plain, STACKS[stack](tmp_path / "other", t))
    assert {found[key].outcome for key in MOMENTS} == {Outcome.SAME}


def test_one_changed_element_is_found_with_its_place(t: Any, tmp_path: Path) -> None:
    a = samples.dcp_job(tmp_path / "a", t)
    t.weights["a.weight"][3, 2] += 0.25
    row = rows(a, samples.deepspeed(tmp_path / "b", t, 3))[("weights", "a.weight")]
    assert (row.outcome, row.at) == (Outcome.DIFFERS, (3, 2))
    assert row.largest_absolute == pytest.approx(0.25)
    assert row.digest_a != row.digest_b
    assert rows(a, tmp_path / "b", 0.3)[("weights", "a.weight")].outcome is Outcome.WITHIN


def test_another_dtype_differs_unless_a_tolerance_is_given(t: Any, tmp_path: Path) -> None:
    half = dataclasses.replace(t, weights={k: v.bfloat16() for k, v in t.weights.items()})
    a, b = samples.safetensors(tmp_path / "a", t), samples.safetensors(tmp_path / "b", half)
    assert {row.outcome for row in rows(a, b).values()} == {Outcome.DTYPE}
    assert {row.outcome for row in rows(a, b, 0.02).values()} == {Outcome.WITHIN}


def test_missing_extra_and_reshaped(t: Any, tmp_path: Path) -> None:
    a = samples.torch_zip(tmp_path / "a.pt", t)
    t.weights["c.weight"] = t.weights.pop("a.bias")
    t.weights["b.bias"] = t.weights["b.bias"].reshape(3, 1)
    found = rows(a, samples.torch_zip(tmp_path / "b.pt", t))
    assert found[("weights", "a.bias")].outcome is Outcome.ONLY_A
    assert found[("weights", "c.weight")].outcome is Outcome.ONLY_B
    assert found[("weights", "b.bias")].outcome is Outcome.SHAPE


def test_names_are_compared_without_what_wrappers_add(t: Any, tmp_path: Path) -> None:
    a = samples.safetensors(tmp_path / "a", t)
    wrapped = {f"module._orig_mod.{name}": value for name, value in t.weights.items()}
    torch.save({"model": wrapped}, tmp_path / "b.pt")
    assert {row.outcome for row in rows(a, tmp_path / "b.pt").values()} == {Outcome.SAME}
    (sorts,) = {tensor.sort.wrappers for tensor in stacks.read(tmp_path / "b.pt").tensors}
    assert sorted(sorts) == ["_orig_mod", "module"]


def test_minus_zero_is_other_bits_and_no_distance(tmp_path: Path) -> None:
    for name, zero in (("a.pt", 0.0), ("b.pt", -0.0)):
        torch.save({"w": torch.full((3,), zero)}, tmp_path / name)
    (row,) = rows(tmp_path / "a.pt", tmp_path / "b.pt").values()
    assert (row.outcome, row.largest_absolute) == (Outcome.DIFFERS, 0.0)
    (row,) = rows(tmp_path / "a.pt", tmp_path / "b.pt", 0.0).values()
    assert row.outcome in EQUAL


def test_values_that_are_no_tensors(t: Any, tmp_path: Path) -> None:
    for name, step in (("a.pt", 3), ("b.pt", 4)):
        torch.save({"model": t.weights, "step": step, "same": [1, 2]}, tmp_path / name)
    a, b = (stacks.read(tmp_path / name) for name in ("a.pt", "b.pt"))
    found = {value.name: value.outcome for value in compare.values(a, b)}
    assert found == {"step": Outcome.DIFFERS, "same": Outcome.SAME}


def test_a_torn_tensor_is_said_to_be_unreadable_and_the_rest_is_compared(
    t: Any, tmp_path: Path
) -> None:
    a = samples.dcp_sharded(tmp_path / "a", t.weights, 2, 0)
    b = samples.dcp_sharded(tmp_path / "b", t.weights, 2, 0)
    shard = b / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-400])
    outcomes = {row.outcome for row in rows(a, b).values()}
    assert outcomes == {Outcome.SAME, Outcome.UNREADABLE}


def test_more_tensors_than_bytes_are_refused(tmp_path: Path) -> None:
    base = torch.zeros(1 << 21)
    torch.save({f"w{i}": base[i:-1] for i in range(30)}, tmp_path / "a.pt")
    found = stacks.read(tmp_path / "a.pt")
    with pytest.raises(UserError, match="bytes of tensors in"):
        list(compare.tensors(found, found))
