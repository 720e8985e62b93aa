"""Conditions of a measured time: the clock that load leaves a GPU.

A GPU at rest runs its first launches at the machine's clock. Under load for longer than `load_ms`
it keeps to its power: what its MMAs take at the clock's voltage, and what it takes anyway, is no
more than `power_watts`, or the clock falls until it is. Light loads never fall below the machine's
clock; the same kernel can lie on either side of it, by how long it has run before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sm100_sim.timing import Values

from .problem import Schedule

#: Dense bf16 FLOP of a CTA in a clock of its tensor core.
FLOP_PER_CLOCK = 8192


#: Seconds of load directly before a call: a few launches on a GPU at rest; for as long as it takes
#: until nothing changes any more.
BURST, SUSTAINED = 0.0, math.inf


@dataclass(frozen=True)
class Call:
    """Launches of one call, one behind another on the GPU. schedules: (how often, schedule).
    beside: seconds of kernels that do nothing but read and write, whatever the clock."""

    schedules: Sequence[tuple[int, Schedule]]
    beside: float = 0.0

    @property
    def flop(self) -> float:
        """Executed by the tensor cores."""
        return FLOP_PER_CLOCK * sum(count * one.work for count, one in self.schedules)

    def at(self, share: float = 1.0) -> float:
        """Seconds at that share of the machine's clock."""
        return self.beside + sum(count * one.seconds_at(share) for count, one in self.schedules)

    def clock_share(self, values: Values) -> float:
        """Return the share of the machine's clock that the GPU sustains: the largest, at most 1, at
        which the call takes no more than `power_watts`."""
        if self.watts(1.0, values) <= values.power_watts:
            return 1.0
        low, high = 0.0, 1.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            if self.watts(middle, values) > values.power_watts:
                high = middle
            else:
                low = middle
        return high

    def watts(self, share: float, values: Values) -> float:
        """Return the watts of the GPU while it does such calls at that share of the machine's
        clock."""
        joules = values.mma_picojoules * 1e-12 * share**values.energy_exponent
        return values.static_watts + joules * self.flop / self.at(share)

    def seconds(self, values: Values, load_seconds: float = BURST) -> float:
        """Return the seconds on the GPU behind so much load of such calls; what of it is within
        `load_ms` of load runs at the machine's clock."""
        burst = self.at()
        fresh = min(1.0, max(0.0, values.load_ms * 1e-3 - load_seconds) / burst)
        if fresh == 1.0:
            return burst
        return fresh * burst + (1 - fresh) * self.at(self.clock_share(values))
