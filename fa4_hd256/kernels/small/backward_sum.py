"""The backward's last kernel where the query heads of a group are split: dK and dV from what each
part of the group gave, in float32, added in the parts' order.

Bound by memory, 1 KiB per row and part, and 512 bytes per row of the result: a warp adds up a row,
a lane 8 columns of it, two parts at a time, whose loads depend on nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from ..limits import WARP_SIZE
from ..problem_class import ELEMENT_TYPES
from ..rows.lanes import LANE_COLUMNS, lane_columns, load_lane_columns
from ..rows.sequences import by_sequence


@dataclass(frozen=True)
class SumConfig:
    num_warps: int = 8


class SumKernel:
    """Launch with `__call__`, under `cute.compile`. dtype: of the results."""

    def __init__(self, config: SumConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = ELEMENT_TYPES[dtype]

    @cute.jit
    def __call__(
        self,
        parts: tuple[cute.Tensor, cute.Tensor],
        results: tuple[cute.Tensor, cute.Tensor],
        stream: Any,
    ) -> None:
        """parts: of dK and of dV, (batch, rows, heads * parts, 256) float32, those of a head one
        after the other.  results: dK and dV, (batch, rows, heads, 256)."""
        batch, rows, heads, _ = results[0].shape
        count = batch * rows * heads
        sizes = tuple(Int32(size) for size in (rows, heads, count))
        parts, results = (tuple(by_sequence(t) for t in pair) for pair in (parts, results))
        of_cta = self.config.num_warps
        self.kernel(parts, results, sizes).launch(
            grid=((count + of_cta - 1) // of_cta, 2, 1),
            block=(of_cta * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        parts: tuple[cute.Tensor, ...],
        results: tuple[cute.Tensor, ...],
        sizes: tuple[Int32, Int32, Int32],
    ) -> None:
        """A row of dK, or of dV, for each warp; neighbouring rows are neighbouring heads."""
        rows, heads, count = sizes
        block, which, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index = block * self.config.num_warps + warp
        if index < count:
            place = index // heads % rows, index % heads, index // heads // rows
            if which == 0:
                self._add(parts[0], results[0], place)
            else:
                self._add(parts[1], results[1], place)

    @cute.jit
    def _add(
        self, parts: cute.Tensor, result: cute.Tensor, place: tuple[Int32, Int32, Int32]
    ) -> None:
        row, head, batch = place
        lane = cute.arch.lane_idx()
        each = cute.size(parts, mode=[2]) // cute.size(result, mode=[2])
        first = head * each
        total = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        total.fill(0.0)
        for part in cutlass.range(0, each, 2, unroll=1):
            # The last one of an odd number is loaded twice, and added once: no branch parts loads.
            second = cutlass.min(part + 1, each - 1)
            loaded = [
                load_lane_columns(parts[row, None, first + number, batch], lane)
                for number in (part, second)
            ]
            for i in range(LANE_COLUMNS):
                total[i] += loaded[0][i]
                more = total[i] + loaded[1][i]
                total[i] = cutlass.select_(second > part, more, total[i])
        rounded = cute.make_rmem_tensor(LANE_COLUMNS, self.dtype)
        rounded.store(total.load().to(self.dtype))
        cute.autovec_copy(rounded, lane_columns(result[row, None, head, batch], lane))
