"""Parts in plain tensors: how they fit is found by exact digests, and what is not known is said."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from ckptdrill.judge import parts
from ckptdrill.judge.parts import Fit, Given
from ckptdrill.model import Cut, Fact
from ckptdrill.observer import fingerprint, movable

G = torch.Generator().manual_seed(3)
WHOLE = torch.randn(12, 6, generator=G)
Rank = Mapping[str, torch.Tensor]


def facts(*ranks: Rank, kind: str = "state") -> tuple[Fact, ...]:
    """What each rank holds under `weights`, as the observer tells it."""
    return tuple(
        Fact(
            kind,
            rank,
            0,
            {
                "weights": {name: fingerprint.entry(tensor) for name, tensor in held.items()},
                "movable": movable.entries({f"weights:{n}": t for n, t in held.items()}),
            },
            rank,
        )
        for rank, held in enumerate(ranks)
    )


def cut(tensor: torch.Tensor, degree: int, dim: int = 0, name: str = "w") -> list[Rank]:
    return [{name: part.contiguous()} for part in tensor.chunk(degree, dim)]


def fit(one: Sequence[Rank], other: Sequence[Rank], given: Given | None = None) -> Fit:
    names = {name for held in (*one, *other) for name in held}
    return parts.fit(facts(*one), facts(*other), "weights", names, given)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("source", "target"), [(2, 1), (1, 2), (2, 3), (3, 2), (1, 6)])
def test_a_cut_along_a_dimension_is_found(source: int, target: int, dim: int) -> None:
    found = fit(cut(WHOLE, source, dim), cut(WHOLE, target, dim))
    assert found.right == {"w"}
    assert not found.broken
    assert not found.unknown


def test_replicas_count_once() -> None:
    doubled = cut(WHOLE, 2) * 2
    neighbours = [rank for rank in cut(WHOLE, 2) for _ in range(2)]
    for ranks in (doubled, neighbours):
        assert fit(ranks, cut(WHOLE, 1)).right == {"w"}


def test_padding_at_the_end_is_no_difference() -> None:
    padded = torch.cat([WHOLE, torch.zeros(2, 6)])
    assert fit(cut(WHOLE, 2), cut(padded, 2)).right == {"w"}


def test_flat_slices_are_put_end_to_end() -> None:
    flat = WHOLE.flatten()
    assert fit(cut(flat, 2), cut(flat, 3)).right == {"w"}


def test_layers_in_one_tensor_are_cut_each_by_itself() -> None:
    gate, up = WHOLE.chunk(2)
    ranks = [
        {"gate_up": torch.cat([g, u])} for g, u in zip(gate.chunk(2), up.chunk(2), strict=True)
    ]
    found = fit(ranks, [{"gate_up": WHOLE}])
    assert found.right == {"gate_up"}
    assert found.ways["gate_up"] == {"dim 0 in 2 blocks"}


def test_what_is_put_together_otherwise_than_the_job_does_it_is_wrong() -> None:
    gate, up = WHOLE.chunk(2)
    ranks = [
        {"gate_up": torch.cat([g, u])} for g, u in zip(gate.chunk(2), up.chunk(2), strict=True)
    ]
    naive = [{"gate_up": torch.cat([rank["gate_up"] for rank in ranks])}]
    begun = Given(begun={"gate_up": frozenset({"dim 0 in 2 blocks"})})
    (text,) = fit(ranks, naive, begun).broken
    assert text.startswith("gate_up is put together otherwise")


def test_experts_that_each_rank_numbers_anew_are_counted_through() -> None:
    experts = [torch.randn(3, 3, generator=G) for _ in range(4)]
    four = [{"experts.0.w": expert} for expert in experts]
    two = [{"experts.0.w": experts[2 * n], "experts.1.w": experts[2 * n + 1]} for n in range(2)]
    assert fit(four, two).right == {"experts.0.w", "experts.1.w"}
    swapped = [two[1], two[0]]
    found = fit(four, swapped)
    assert not found.right
    assert found.unknown


def test_a_part_of_the_wrong_rank_is_wrong_where_the_save_has_the_whole() -> None:
    saved = Given(saved=(Fact("inventory", 0, 0, {"movable": movable.entries({"w": WHOLE})}, 1),))
    wrong = cut(WHOLE, 4)
    wrong[3] = wrong[2]
    (text,) = fit(cut(WHOLE, 2), wrong, saved).broken
    assert text.startswith("w on rank 2, 3 is not the reference's part")


def test_what_the_owner_says_is_held_against_the_target() -> None:
    declared = Given(declared={"w*": Cut(dim=0)})
    wrong = cut(WHOLE, 4)[::-1]
    assert fit(cut(WHOLE, 2), wrong, declared).broken
    assert fit(cut(WHOLE, 2), cut(WHOLE, 4), declared).right == {"w"}


def test_what_nothing_explains_is_unknown_and_never_an_accusation() -> None:
    other = cut(torch.randn(12, 6, generator=G), 1)
    found = fit(cut(WHOLE, 2), other)
    assert not found.broken
    assert found.unknown == ("w ([6, 6] on 2 ranks, [12, 6] on 1 rank after the restore)",)
    assert 'policy.parts: {"w": {dim: …}}' in parts.advice(found.unknown)


def test_zeros_are_parts_where_the_shapes_add_up() -> None:
    zeros, bias = torch.zeros(12), cut(WHOLE, 2)
    two = [{**b, **z} for b, z in zip(bias, cut(zeros, 2, name="bias"), strict=True)]
    assert fit(two, [{"w": WHOLE, "bias": zeros}]).right == {"w", "bias"}


def test_one_flipped_bit_of_a_part_is_seen() -> None:
    ranks: list[dict[str, Any]] = [dict(rank) for rank in cut(WHOLE, 2)]
    flipped = ranks[1]["w"].clone()
    flipped.view(torch.int32)[2, 3] ^= 1
    ranks[1]["w"] = flipped
    assert not fit(ranks, cut(WHOLE, 1)).right


def test_zeros_fit_in_every_way_and_show_none() -> None:
    zeros = torch.zeros(12)
    two = [
        {"w": w["w"], "bias": z["bias"]}
        for w, z in zip(cut(WHOLE, 2), cut(zeros, 2, name="bias"), strict=True)
    ]
    found = fit(two, [{"w": WHOLE, "bias": zeros}])
    assert "bias" not in found.ways or not found.ways["bias"]
