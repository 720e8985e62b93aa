"""Steps of the decode kernel over keys and values in e4m3 and in bf16, on the timing model.

One CTA with an SM's share of L2 is replayed on one tile of two lengths: their difference is what
steps take, the rest what a tile begins and ends with.  HBM bounds all CTAs together: a step takes
its share of HBM for its bytes at least.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4_hd256.kernels.blackwell.decode.config import BLOCK_KV
from lab.model.calls import Kind
from lab.model.our_decode import DecodeVariant, Sample, call_on
from sm100_sim import timing
from sm100_sim.timing import Machine

__all__ = ["Steps", "steps_of"]

GROUP = 8  # query heads of the KV head
SHORT, LONG = 1024, 3072


@dataclass(frozen=True)
class Steps:
    """Clocks. step: of 128 keys, without a bound by HBM; ends: what a tile takes besides; hbm: an
    SM's share of HBM for the bytes of a step."""

    step: float
    ends: float
    hbm: float

    @property
    def bound(self) -> float:
        """Return the clocks of a step where all SMs load from HBM."""
        return max(self.step, self.hbm)

    def of_keys(self, keys: int) -> float:
        """Return the clocks of a tile of so many keys, from HBM."""
        return self.ends + keys // BLOCK_KV * self.bound


def steps_of(rows: int, e4m3: bool, machine: Machine) -> Steps:
    """Return the steps of the kernel with so many query rows: a causal tile of 8 heads over one KV
    head, all rows in use."""
    variant = DecodeVariant(Kind(causal=True), rows, rows // GROUP, GROUP, e4m3=e4m3)
    short, long = (_clocks(variant, keys, machine) for keys in (SHORT, LONG))
    step = (long - short) / ((LONG - SHORT) // BLOCK_KV)
    values = machine.values()
    share = values.hbm_terabytes * 1e3 / values.clock_ghz / values.sms
    step_bytes = variant.config.tiles.step_bytes
    return Steps(step, short - SHORT // BLOCK_KV * step, step_bytes / share)


def _clocks(variant: DecodeVariant, keys: int, machine: Machine) -> float:
    """Return the clocks of one tile."""
    compiled, arguments = call_on(machine, variant, Sample(keys))
    return float(timing.predict(compiled, *arguments, machine=machine, draws=0)[-1].clocks[0])
