"""Conditions of a measured time: the clock that load leaves a GPU, and the host's part.

A GPU at rest runs its first launches at the machine's clock. Under load for longer than `load_ms`
it keeps to its power: what its MMAs take at the clock's voltage, and what it takes anyway, is no
more than `power_watts`, or the clock falls until it is. Light loads never fall below the machine's
clock; the same kernel can lie on either side of it, by how long it has run before.

A call is issued by a host, which takes its own time. Calls in a row overlap: the longer of the two
decides, and the shorter one shows once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sm100_sim.timing import Values

from .problem import Schedule

#: Dense bf16 FLOP of a CTA in a clock of its tensor core.
FLOP_PER_CLOCK = 8192


@dataclass(frozen=True)
class Conditions:
    """calls: issued one behind another between two readings of a timer. load_seconds: of such calls
    directly before. host_seconds: that the host takes to issue one; 0 where a graph is replayed or
    the GPU is kept busy meanwhile."""

    calls: int = 1
    load_seconds: float = 0.0
    host_seconds: float = 0.0


#: A few launches on a GPU at rest.
BURST = Conditions()
#: For as long as it takes until nothing changes any more.
SUSTAINED = Conditions(load_seconds=math.inf)


@dataclass(frozen=True)
class Call:
    """Launches of one call, one behind another on the GPU.

    schedules: (how often, schedule). beside: seconds of kernels that do nothing but read and write,
    whatever the clock.
    """

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

    def seconds(self, values: Values, conditions: Conditions = BURST) -> float:
        """Return the seconds of each call, as measured under these conditions."""
        return self.host_and_device(self.device_seconds(values, conditions), conditions)

    def device_seconds(self, values: Values, conditions: Conditions = BURST) -> float:
        """Return the seconds of each call on the GPU, whatever the host does: the mean over the
        calls; those within `load_ms` of load run at the machine's clock."""
        burst = self.at()
        left = max(0.0, values.load_ms * 1e-3 - conditions.load_seconds)
        fresh = min(conditions.calls, left / burst)
        if fresh == conditions.calls:
            return burst
        late = self.at(self.clock_share(values))
        return (fresh * burst + (conditions.calls - fresh) * late) / conditions.calls

    @staticmethod
    def host_and_device(device: float, conditions: Conditions) -> float:
        """Seconds of each of the calls, from when the host begins to issue the first to
        the end of the last on the GPU."""
        calls, host = conditions.calls, conditions.host_seconds
        return max(calls * host + device, host + calls * device) / calls
