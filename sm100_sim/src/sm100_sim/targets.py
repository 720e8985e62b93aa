"""Limits that differ between the targets that PTX is compiled for.

Sources of those of sm_107: CuTe DSL 4.8.1 (its tables of tensor memory and shared memory, and the
descriptors that it makes for sm_107a), and the enumerators of CUDA 13.5 for oversized shared
memory. Nothing here has been seen on a GPU of that target.
"""

from __future__ import annotations

from dataclasses import dataclass

from .devices import SHARED_OF_AN_SM, SHARED_OPT_IN, SHARED_OVERSIZED


@dataclass(frozen=True)
class Limits:
    """Memories of an SM as kernels of a target may use them.

    columns: of tensor memory, all of which only an exclusive allocation gets. shared_of_an_sm:
    bytes; shared_of_a_cta: static and dynamic ones of a CTA, in the shared memory mode that allows
    most. address_bits: of the start address and the leading offset in the matrix descriptors of
    tcgen05, which count 16 bytes.
    """

    columns: int = 512
    shared_of_an_sm: int = SHARED_OF_AN_SM
    shared_of_a_cta: int = SHARED_OPT_IN
    address_bits: int = 14


_LIMITS = Limits()
_RUBIN = Limits(
    columns=576, shared_of_an_sm=328 << 10, shared_of_a_cta=SHARED_OVERSIZED, address_bits=15
)

#: Columns of the target that has most.
MOST_COLUMNS = _RUBIN.columns


def limits_of(target: str) -> Limits:
    """Return the limits of a target, "sm_107a" for instance."""
    return _RUBIN if target.startswith("sm_107") else _LIMITS
