"""The kernel after a forward with split keys: one result from those of the parts of the keys.

Part i of a row has O_i, divided by its own sum, and LSE_i.  With L = ln sum_i exp(LSE_i) the row's
result is out = sum_i exp(LSE_i - L) O_i and LSE = L (arXiv 2205.14135, algorithm 1, for blocks that
are worked on one after the other).  A part without a visible key has LSE_i = -inf and weighs
nothing, whatever its O_i holds; a row without any has out = 0 and LSE = -inf.

A warp makes one row: each lane the weight of one part, then 8 columns of the row.

NOTE [before the forward ends].  By programmatic dependent launch (PTX ISA 9.7.13.15,
griddepcontrol) its CTAs may be there while the last ones of the forward end; they wait until all
that the forward wrote can be seen before they read any of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from softmax_emu.exp2 import exp2_row_factor

from .limits import WARP_SIZE
from .views import LANE_COLUMNS, by_sequence, lane_columns, load_lane_columns

__all__ = ["CombineConfig", "CombineKernel"]

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class CombineConfig:
    """num_warps: warps of a CTA, a row each. parts_at_once: parts whose loads are in flight
    together. starts_early: NOTE [before the forward ends].

    Raises ValueError where the parts of a turn do not divide the lanes of a warp.
    """

    num_warps: int = 4
    parts_at_once: int = 4
    starts_early: bool = False

    def __post_init__(self) -> None:
        # Parts past the last have a weight as long as they have a lane.
        if self.parts_at_once < 1 or WARP_SIZE % self.parts_at_once:
            raise ValueError(
                f"parts_at_once is {self.parts_at_once}; accepted: a divisor of {WARP_SIZE}"
            )


class CombineKernel:
    """Launch with `__call__`, under `cute.compile`.

    dtype: of out, cutlass.BFloat16 or Float16.
    """

    def __init__(self, config: CombineConfig, dtype: Any) -> None:
        self.config = config
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        parts: tuple[cute.Tensor, cute.Tensor],
        results: tuple[cute.Tensor, cute.Tensor],
        stream: Any,
    ):
        """parts: (batch * splits, seqlen, heads, 256) and (batch * splits, heads, seqlen), float32,
        the parts of a batch entry one after the other, at most `WARP_SIZE` of them.  results: out
        (batch, seqlen, heads, 256) and lse (batch, heads, seqlen) float32."""
        batch, seqlen, heads, _ = results[0].shape
        splits = cute.size(parts[0], mode=[0]) // batch
        sizes = tuple(Int32(size) for size in (seqlen, heads, batch, splits))
        num_warps = self.config.num_warps
        self.kernel(
            (by_sequence(parts[0]), parts[1]), (by_sequence(results[0]), results[1]), sizes
        ).launch(
            grid=((batch * seqlen * heads + num_warps - 1) // num_warps, 1, 1),
            block=(num_warps * WARP_SIZE, 1, 1),
            stream=stream,
            use_pdl=self.config.starts_early,
        )

    @cute.kernel
    def kernel(self, parts: tuple, results: tuple, sizes: tuple[Int32, Int32, Int32, Int32]):
        """A row for each warp; neighbouring rows are neighbouring heads."""
        if cutlass.const_expr(self.config.starts_early):
            cute.arch.griddepcontrol_wait()
        seqlen, heads, batch, splits = sizes
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index = block * self.config.num_warps + warp
        if index < batch * seqlen * heads:
            place = (index // heads % seqlen, index % heads, index // heads // seqlen)
            self._combine(parts, results, place, splits)

    @cute.jit
    def _combine(
        self, parts: tuple, results: tuple, place: tuple[Int32, Int32, Int32], splits: Int32
    ):
        """The row at place = (row, head, batch entry)."""
        row, head, batch = place
        part_out, part_lse = parts
        out, lse = results
        lane, at_once = cute.arch.lane_idx(), self.config.parts_at_once
        first = batch * splits
        own = self._own_lse(part_lse, (first, head, row), splits)
        weight, total = self._weight(own)
        sums = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        sums.fill(0.0)
        for start in cutlass.range(0, splits, at_once, unroll=1):
            # A part past the last is replaced by it, with no weight: no branch parts the loads.
            loaded = [
                load_lane_columns(
                    part_out[row, None, head, first + cutlass.min(start + i, splits - 1)], lane
                )
                for i in range(at_once)
            ]
            for i, values in enumerate(loaded):
                factor = cute.arch.shuffle_sync(weight, start + i)
                # Not where the weight is 0: the row may see a NaN whose weight underflows.
                is_void = cute.arch.shuffle_sync(own, start + i) == Float32(-math.inf)
                for column in range(LANE_COLUMNS):
                    value = cutlass.select_(is_void, Float32(0.0), values[column])
                    sums[column] = cute.math.fma(factor, value, sums[column])
        rounded = cute.make_rmem_tensor(LANE_COLUMNS, self.dtype)
        rounded.store(sums.load().to(self.dtype))
        cute.autovec_copy(rounded, lane_columns(out[row, None, head, batch], lane))
        if lane == 0:
            lse[batch, head, row] = total

    def _own_lse(
        self, part_lse: cute.Tensor, place: tuple[Int32, Int32, Int32], splits: Int32
    ) -> Float32:
        """LSE of this lane's part, times log2(e); -inf for a lane without a part."""
        first, head, row = place
        lane = cute.arch.lane_idx()
        own = part_lse[first + cutlass.min(lane, splits - 1), head, row] * LOG2_E
        return cutlass.select_(lane < splits, own, Float32(-math.inf))

    def _weight(self, own: Float32) -> tuple[Float32, Float32]:
        """(exp(LSE_lane - L), L) from `_own_lse`."""
        largest = cute.arch.warp_reduction_max(own)
        # No difference of infinities where no part has any key.
        largest = cutlass.select_(largest == -math.inf, Float32(0.0), largest)
        weight = exp2_row_factor(own - largest)
        total = cute.arch.warp_reduction_sum(weight)
        is_void = total == Float32(0.0)
        inverse = cutlass.select_(is_void, Float32(0.0), cute.arch.rcp_approx(total))
        lse = (largest + cute.math.log2(total, approx=True, ftz=True)) * math.log(2.0)
        return weight * inverse, cutlass.select_(is_void, Float32(-math.inf), lse)
