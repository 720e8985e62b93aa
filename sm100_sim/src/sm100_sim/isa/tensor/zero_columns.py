"""Columns of B that a product of tcgen05.mma.ws takes: the zero-column mask.

PTX ISA 9.3, "Zero-Column Mask Descriptor". D has 128 / M groups of lanes, each with its part of N
and its part of the mask, in which spans of used columns and of zeros are interleaved. The table of
the descriptor names the spans the other way round than its examples, which are followed here.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sm100_sim.state.tmem import LANES

from .descriptors import DescriptorError

#: Bits that must be 0.
_RESERVED = 7 << 36 | 3 << 62
#: Largest column shift by bits 30 and 31 of the instruction descriptor.
_SHIFTS = (0, 8, 16, 32)


def _check(condition: bool, raw: int, message: str) -> None:
    if not condition:
        raise DescriptorError(f"zero-column mask descriptor {raw:#018x}: {message}")


@lru_cache(maxsize=256)
def source_columns(raw: int, m: int, n: int, limit: int) -> np.ndarray:
    """Return the column of B for each of the N columns of a product, or -1 for zeros.

    limit: bits 30 and 31 of the instruction descriptor, which name the largest shift.
    """
    shift = raw >> 56 & 63
    most = min(_SHIFTS[limit], 16 if m == 32 else 32)
    _check(not raw & _RESERVED, raw, "a reserved bit (36 to 38, 62, 63) is set, accepted 0")
    _check(
        shift <= most,
        raw,
        f"column shift {shift}, accepted 0 to {most} with M {m} and bits 30 and 31 of the "
        f"instruction descriptor {limit}",
    )
    columns = np.arange(n)
    if raw >> 39 & 1:
        for part, inside in enumerate(np.split(columns, LANES // m)):
            inside[_zeros(raw, part, len(inside))] = -shift - 1
    columns += shift
    columns.setflags(write=False)
    return columns


def _zeros(raw: int, part: int, count: int) -> np.ndarray:
    """Return which of the `count` columns of a part of the mask are zeros, as bool."""
    used, zero = (raw >> 48 & 255) + 1, (raw >> 40 & 255) + 1
    start, zeros_first = raw >> 8 * part & 255, raw >> 32 + part & 1
    first = zero if zeros_first else used
    _check(
        start < first,
        raw,
        f"start count {start} of mask {part}, accepted less than its first span, {first}",
    )
    behind_first = (np.arange(count) + start) % (used + zero) >= first
    return behind_first != bool(zeros_first)
