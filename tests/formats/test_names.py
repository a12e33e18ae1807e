"""Indices of an optimizer become names only where shapes and order leave no doubt."""

from pathlib import Path

import pytest

from ckptdrill.formats import names, stacks
from ckptdrill.formats.kinds import Kind, Sort
from ckptdrill.formats.layout import TensorMeta

samples = pytest.importorskip("tests.formats.samples")


def entries(
    weights: dict[str, tuple[int, ...]], moments: list[tuple[int, ...]]
) -> list[names.Entry]:
    found = [(name, Sort(Kind.WEIGHT, name), meta(shape)) for name, shape in weights.items()]
    for number, shape in enumerate(moments):
        found.append((str(number), Sort(Kind.MOMENT, str(number), "exp_avg"), meta(shape)))
    return found


def meta(shape: tuple[int, ...]) -> TensorMeta:
    return TensorMeta("float32", shape, ())


ONE_GROUP = [Sort(Kind.GROUPS, "param_groups.0.lr")]


def test_buffers_between_the_weights_are_passed_over() -> None:
    weights = {"a": (2, 2), "buffer": (7,), "b": (3,)}
    assert names.resolved(entries(weights, [(2, 2), (3,)]), ONE_GROUP) == {"0": "a", "1": "b"}


def test_doubt_leaves_the_index() -> None:
    two_ways = {"a": (2,), "buffer": (2,), "b": (3,)}
    assert names.resolved(entries(two_ways, [(2,), (3,)]), ONE_GROUP) == {}
    other_order = {"a": (2,), "b": (3,)}
    assert names.resolved(entries(other_order, [(3,), (2,)]), ONE_GROUP) == {}
    assert names.resolved(entries(other_order, [(2,), (4,)]), ONE_GROUP) == {}
    groups = [*ONE_GROUP, Sort(Kind.GROUPS, "param_groups.1.lr")]
    assert names.resolved(entries(other_order, [(2,), (3,)]), groups) == {}


def test_a_checkpoint_says_that_it_was_done(tmp_path: Path) -> None:
    found = stacks.read(samples.write(tmp_path, "torch.save/step-3.pt"))
    named = {t.sort.name for t in found.tensors if t.sort.kind is Kind.MOMENT}
    assert named == {*samples.SHAPES}
    assert "moments are stored by index" in found.notes[0]
