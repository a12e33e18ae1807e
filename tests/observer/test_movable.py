"""The movable fingerprint: exact against plain Python, and parts that add up wherever they are."""

import struct

import pytest
import torch

from ckptdrill.observer import movable
from ckptdrill.observer.powers import BASES, FLAT, LANES, PRIMES


def words(tensor: torch.Tensor) -> list[int]:
    digest = movable.entry(tensor)[4]
    return [int(digest[at : at + 8], 16) for at in range(0, 32, 8)]


def reference(tensor: torch.Tensor) -> list[int]:
    """The definition, element by element."""
    size = tensor.element_size()
    data = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    code, width = ("b", 1) if size == 1 else ("h", 2)
    values = struct.unpack(f"<{len(data) // width}{code}", bytes(data))
    each = size // width
    found = []
    for flat in (False, True):
        for k, prime in enumerate(PRIMES):
            total = 0
            for n, value in enumerate(values):
                element, lane = divmod(n, each)
                weight = pow(BASES[k][LANES], lane, prime)
                if flat:
                    weight *= pow(BASES[k][FLAT], element, prime)
                else:
                    for dim in reversed(range(tensor.dim())):
                        element, index = divmod(element, tensor.shape[dim])
                        weight *= pow(BASES[k][dim], index, prime)
                total += value * weight
            found.append(total % prime)
    return found


def made(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape) + 1)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=g).to(dtype)
    return torch.randint(-100, 100, shape, generator=g).to(dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (5, 9), (3, 4, 5), (2, 3, 2, 3)])
def test_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = made(shape, dtype)
    assert words(tensor) == reference(tensor)


def test_transposed_and_extreme_values() -> None:
    tensor = torch.full((300, 7), -(2**31), dtype=torch.int32).t()
    assert words(tensor) == reference(tensor)


@pytest.mark.parametrize("shape", [(70_001,), (3, 40_000), (40_000, 3), (2, 66_000, 2)])
def test_long_dimensions_add_up_from_parts(shape: tuple[int, ...]) -> None:
    tensor = made(shape, torch.float32)
    whole = words(tensor)
    for dim in range(len(shape)):
        cut = max(1, shape[dim] // 3)
        one, two = tensor.split([cut, shape[dim] - cut], dim)
        for k, prime in enumerate(PRIMES):
            moved = words(two.contiguous())[k] * pow(BASES[k][dim], cut, prime)
            assert (words(one)[k] + moved) % prime == whole[k]
    flat = tensor.reshape(-1)
    for k, prime in enumerate(PRIMES):
        moved = words(flat[1234:])[2 + k] * pow(BASES[k][FLAT], 1234, prime)
        assert (words(flat[:1234])[2 + k] + moved) % prime == whole[2 + k]


def test_extremes_do_not_overflow() -> None:
    tensor = torch.full((1, 1 << 16), -(1 << 15), dtype=torch.int16)
    assert words(tensor) == reference(tensor)


def test_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    movable.entry(torch.ones(5, 5))
    assert torch.equal(before, torch.get_rng_state())
