"""Clocks of a Hopper GPU's SMs under a load of its tensor cores, in first launches and sustained.

In first launches the clock follows the share of clocks that the tensor cores work. Later the power
budget takes its part: GPUs of one kind differ in what a FLOP costs them, so a product by itself,
measured on the very GPU, says what the budget leaves of its attention (`Clocks.of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.whole.conditions import Call
from sm100_sim.timing import Values

#: Shares of their clocks that tensor cores work: in cuDNN's attention, in a product.
ATTENTION_BUSY, PRODUCT_BUSY = 0.69, 0.95
#: GHz as soon as tensor cores work at all (lab/micro/whole_gpu_measured.json).
MOST_GHZ = 1.80
#: FLOP of the product: square matrices of 8,192 rows.
PRODUCT_FLOP = 2.0 * 8192**3


@dataclass(frozen=True)
class Clocks:
    """attention_ghz, product_ghz: of cuDNN's attention and of a product of random numbers in first
    launches. picojoules: a FLOP at the clock of first launches; None for the machine's constant.
    The defaults are an H200's, as lab/micro/whole_gpu_measured.json has it."""

    attention_ghz: float = 1.705
    product_ghz: float = 1.60
    picojoules: float | None = None

    @classmethod
    def of(cls, product: Mapping[str, Any], attention: Mapping[str, Any], values: Values) -> Clocks:
        """Return the clocks of a GPU from both measured on it, as `lab/micro/hopper_rows.json` has
        them: the energy of a FLOP is what makes the product's sustained clock that which the budget
        leaves."""
        (_, first), (late_us, late) = product["first"], product["late"]
        rate = PRODUCT_FLOP / (late_us * 1e-6)
        watts = values.power_watts - values.static_watts
        joules = watts / rate / (late / first) ** values.energy_exponent
        return cls(attention["first"][1] * 1e-3, first * 1e-3, joules * 1e12)

    def first(self, busy: float) -> float:
        """GHz in first launches of a kernel that keeps the tensor cores busy for a share of their
        clocks."""
        slope = (self.product_ghz - self.attention_ghz) / (PRODUCT_BUSY - ATTENTION_BUSY)
        return min(MOST_GHZ, self.attention_ghz + (busy - ATTENTION_BUSY) * slope)

    def for_good(self, first: float, call: Call, values: Values) -> float:
        """GHz that the power budget leaves of those of first launches. values: of a machine held
        at some clock; energies are those of the first launches' voltage, whatever that clock is."""
        share = first / values.clock_ghz
        picojoules = self.picojoules or values.mma_picojoules
        given = values._replace(mma_picojoules=picojoules / share**values.energy_exponent)
        if call.watts(share, given) <= given.power_watts:
            return first
        return min(first, call.clock_share(given) * values.clock_ghz)


#: Clocks of the GPU that the machine's constants were measured on.
DEFAULT = Clocks()
