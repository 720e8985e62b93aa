"""The kernel after a forward with split keys: one result from those of the parts of the keys.

Part i of a row has O_i, divided by its own sum, and LSE_i.  With L = ln sum_i exp(LSE_i) the row's
result is out = sum_i exp(LSE_i - L) O_i and LSE = L (arXiv 2205.14135, algorithm 1, for blocks that
are worked on one after the other).  A part without a visible key has LSE_i = -inf and weighs
nothing, whatever its O_i holds; a row without any has out = 0 and LSE = -inf.

A lane makes the weight of a part, or of two; then a warp has the columns of a row, 8 a lane, of all
parts, or of some.

NOTE [warps of a row].  Few rows are far fewer warps than a GPU holds, and a warp that reads all of
32 parts takes one round trip to L2 for each `parts_at_once`.  So with more parts several warps of a
CTA share a row: each adds up its own parts, and from shared memory the threads add up the warps'
sums, in their order.

NOTE [before the forward ends].  By programmatic dependent launch (PTX ISA 9.7.13.15,
griddepcontrol) its CTAs may be there while the last ones of the forward end, if all of these have
said so; they wait until all that the forward wrote can be seen before they read any of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from softmax_emu.exp2 import exp2_row_factor

from .limits import HEAD_DIM, WARP_SIZE
from .views import LANE_COLUMNS, by_sequence, columns_of, lane_columns, load_lane_columns

__all__ = ["MOST_PARTS", "CombineConfig", "CombineKernel", "CombineRule"]

LOG2_E = math.log2(math.e)
#: Parts of a row, at most: two for each lane.
MOST_PARTS = 2 * WARP_SIZE


@dataclass(frozen=True)
class CombineConfig:
    """num_warps: warps of a CTA. parts_at_once: parts whose loads a warp has in flight together.
    starts_early: NOTE [before the forward ends]. row_warps: of a row, 1 or all of a CTA: NOTE
    [warps of a row]. lane_parts: parts whose weights a lane makes.

    Raises ValueError where the parts of a turn do not divide the lanes of a warp, or `row_warps`
    is none of these.
    """

    num_warps: int = 4
    parts_at_once: int = 4
    starts_early: bool = False
    row_warps: int = 1
    lane_parts: int = 1

    def __post_init__(self) -> None:
        # Parts past the last have a weight as long as they have a lane.
        if self.parts_at_once < 1 or WARP_SIZE % self.parts_at_once:
            raise ValueError(
                f"parts_at_once is {self.parts_at_once}; accepted: a divisor of {WARP_SIZE}"
            )
        if self.row_warps not in (1, self.num_warps) or HEAD_DIM % self.num_warps:
            raise ValueError(
                f"row_warps is {self.row_warps}; accepted: 1, or num_warps, which is "
                f"{self.num_warps} and must divide {HEAD_DIM}"
            )

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA."""
        return self.num_warps // self.row_warps


@dataclass(frozen=True)
class CombineRule:
    """Which configuration calls get.

    config: of parts whose loads one warp has in flight together, or of any number where
    `most_row_warps` is 1. most_row_warps: a power of two.
    """

    config: CombineConfig = field(default_factory=CombineConfig)
    most_row_warps: int = 1

    def of(self, parts: int) -> CombineConfig:
        """A warp of a row for each `parts_at_once`, rounded up to a power of two; a lane for each
        part, while there are enough. Raises ValueError for more than `MOST_PARTS`."""
        if not 1 <= parts <= MOST_PARTS:
            raise ValueError(f"{parts} parts of the keys; accepted: 1 to {MOST_PARTS}")
        turns = -(-parts // self.config.parts_at_once)
        warps = min(1 << max(turns - 1, 0).bit_length(), self.most_row_warps)
        lane_parts = -(-parts // WARP_SIZE)
        if warps == 1:
            return replace(self.config, lane_parts=lane_parts)
        return replace(self.config, num_warps=warps, row_warps=warps, lane_parts=lane_parts)


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
        the parts of a batch entry one after the other, at most `WARP_SIZE * lane_parts` of them.
        results: out (batch, seqlen, heads, 256) and lse (batch, heads, seqlen) float32."""
        batch, seqlen, heads, _ = results[0].shape
        splits = cute.size(parts[0], mode=[0]) // batch
        sizes = tuple(Int32(size) for size in (seqlen, heads, batch, splits))
        num_warps, rows = self.config.num_warps, self.config.cta_rows
        self.kernel(
            (by_sequence(parts[0]), parts[1]), (by_sequence(results[0]), results[1]), sizes
        ).launch(
            grid=((batch * seqlen * heads + rows - 1) // rows, 1, 1),
            block=(num_warps * WARP_SIZE, 1, 1),
            stream=stream,
            use_pdl=self.config.starts_early,
        )

    @cute.kernel
    def kernel(self, parts: tuple, results: tuple, sizes: tuple[Int32, Int32, Int32, Int32]):
        """A row for each warp, or for all; neighbouring rows are neighbouring heads."""
        if cutlass.const_expr(self.config.starts_early):
            cute.arch.griddepcontrol_wait()
        seqlen, heads, batch, splits = sizes
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.config.row_warps > 1):
            place = (block // heads % seqlen, block % heads, block // heads // seqlen)
            self._combine_together(parts, results, place, (warp, splits))
        else:
            index = block * self.config.num_warps + warp
            if index < batch * seqlen * heads:
                place = (index // heads % seqlen, index % heads, index // heads // seqlen)
                self._combine(parts, results, place, splits)

    @cute.jit
    def _combine(
        self, parts: tuple, results: tuple, place: tuple[Int32, Int32, Int32], splits: Int32
    ):
        """The row at place = (row, head, batch entry) by one warp."""
        row, head, batch = place
        out, lse = results
        lane = cute.arch.lane_idx()
        sums, total = self._sums(parts, place, (Int32(0), splits))
        rounded = cute.make_rmem_tensor(LANE_COLUMNS, self.dtype)
        rounded.store(sums.load().to(self.dtype))
        cute.autovec_copy(rounded, lane_columns(out[row, None, head, batch], lane))
        if lane == 0:
            lse[batch, head, row] = total

    @cute.jit
    def _combine_together(
        self, parts: tuple, results: tuple, place: tuple[Int32, Int32, Int32], share: tuple
    ):
        """The row at place by all warps of the CTA.  share: (this warp, parts in all)."""
        row, head, batch = place
        out, lse = results
        warps, (warp, _) = self.config.num_warps, share
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        of_warps = cute.make_tensor(
            SmemAllocator().allocate_array(Float32, warps * HEAD_DIM, byte_alignment=128),
            cute.make_layout((HEAD_DIM, warps)),
        )
        sums, total = self._sums(parts, place, share)
        cute.autovec_copy(sums, lane_columns(of_warps[None, warp], lane))
        cute.arch.sync_threads()
        columns = max(1, HEAD_DIM // (warps * WARP_SIZE))
        if thread < HEAD_DIM // columns:
            found = cute.make_rmem_tensor(columns, Float32)
            found.fill(0.0)
            for other in range(warps):
                values = cute.make_rmem_tensor(columns, Float32)
                cute.autovec_copy(
                    columns_of(of_warps[None, other], thread * columns, columns), values
                )
                for column in range(columns):
                    found[column] = found[column] + values[column]
            rounded = cute.make_rmem_tensor(columns, self.dtype)
            rounded.store(found.load().to(self.dtype))
            cute.autovec_copy(
                rounded, columns_of(out[row, None, head, batch], thread * columns, columns)
            )
        if thread == 0:
            lse[batch, head, row] = total

    @cute.jit
    def _sums(self, parts: tuple, place: tuple[Int32, Int32, Int32], share: tuple):
        """(this lane's columns of the sum over the parts of this warp, LSE of all)."""
        row, head, batch = place
        part_out, part_lse = parts
        warp, splits = share
        lane, at_once = cute.arch.lane_idx(), self.config.parts_at_once
        first = batch * splits
        own = [
            self._own_lse(part_lse, (first, head, row), splits, number * WARP_SIZE)
            for number in range(self.config.lane_parts)
        ]
        weights, total = self._weights(own)
        sums = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        sums.fill(0.0)
        turn = at_once * self.config.row_warps
        for start in cutlass.range(warp * at_once, splits, turn, unroll=1):
            # A part past the last is replaced by it, with no weight: no branch parts the loads.
            loaded = [
                load_lane_columns(
                    part_out[row, None, head, first + cutlass.min(start + i, splits - 1)], lane
                )
                for i in range(at_once)
            ]
            # The parts of a turn are those of neighbouring lanes.
            weight, lse = self._of_turn(weights, start), self._of_turn(own, start)
            for i, values in enumerate(loaded):
                owner = start + i
                if cutlass.const_expr(self.config.lane_parts > 1):
                    owner = owner % WARP_SIZE
                factor = cute.arch.shuffle_sync(weight, owner)
                # Not where the weight is 0: the row may see a NaN whose weight underflows.
                is_void = cute.arch.shuffle_sync(lse, owner) == Float32(-math.inf)
                for column in range(LANE_COLUMNS):
                    value = cutlass.select_(is_void, Float32(0.0), values[column])
                    sums[column] = cute.math.fma(factor, value, sums[column])
        return sums, total

    def _of_turn(self, values: list, start: Int32) -> Float32:
        """Of a lane's values, that of the parts from `start` on."""
        found = values[0]
        for number in range(1, len(values)):
            found = cutlass.select_(start >= number * WARP_SIZE, values[number], found)
        return found

    def _own_lse(
        self, part_lse: cute.Tensor, place: tuple[Int32, Int32, Int32], splits: Int32, begin: int
    ) -> Float32:
        """LSE of this lane's part, of those from `begin` on, times log2(e); -inf for a lane without
        a part."""
        first, head, row = place
        part = cute.arch.lane_idx() + begin if begin else cute.arch.lane_idx()
        own = part_lse[first + cutlass.min(part, splits - 1), head, row] * LOG2_E
        return cutlass.select_(part < splits, own, Float32(-math.inf))

    def _weights(self, own: list[Float32]) -> tuple[list[Float32], Float32]:
        """([exp(LSE - L) for each of this lane's parts], L) from `_own_lse`."""
        largest = own[0]
        for other in own[1:]:
            largest = cute.arch.fmax(largest, other)
        largest = cute.arch.warp_reduction_max(largest)
        # No difference of infinities where no part has any key.
        largest = cutlass.select_(largest == -math.inf, Float32(0.0), largest)
        weights = [exp2_row_factor(lse - largest) for lse in own]
        total = weights[0]
        for other in weights[1:]:
            total = total + other
        total = cute.arch.warp_reduction_sum(total)
        is_void = total == Float32(0.0)
        inverse = cutlass.select_(is_void, Float32(0.0), cute.arch.rcp_approx(total))
        lse = (largest + cute.math.log2(total, approx=True, ftz=True)) * math.log(2.0)
        lse = cutlass.select_(is_void, Float32(-math.inf), lse)
        return [weight * inverse for weight in weights], lse
