"""The numbers that a movable digest is made with: two primes and the bases of the dimensions.

Standard library only, because the judge moves the digests that the observer makes (`movable`), and
imports no torch. `BASES[k][d]` belongs to prime `k` and dimension `d`; the last is that of the
flattened elements, the one before it that of the 16-bit lanes of an element.
"""

from __future__ import annotations

PRIMES = (2147483647, 2147483629)  # the two largest below 2**31
MAX_DIMS = 12
LANES = MAX_DIMS
FLAT = MAX_DIMS + 1
FUSED = (2, 3)  # blocks of layers that are kept in one tensor: gate and up; query, key and value
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The splitmix64 output function."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


BASES = tuple(
    tuple(_mix(64 * k + d) % (prime - 2) + 2 for d in range(MAX_DIMS + 2))
    for k, prime in enumerate(PRIMES)
)
