"""Q of a tile: the rows come by TMA, and the consumers bring them to f16 where they lie:
`kernels.forward.e4m3_queries` NOTE [Q in place].
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...forward.decode_softmax import synchronise
from ...forward.e4m3_queries import ScaledRows
from ...ranges import traced
from ...rows.views import columns_of
from .context import HopperE4m3DecodeContext

__all__ = ["QueryRows"]


class QueryRows(ScaledRows):
    """Mixed into the decode kernel; the shared state is its
    `HopperE4m3DecodeContext`."""

    top_exponent = 14
    rows_at_once = 4  # more take registers that a warp has not
    rows_memory, rows_edge = "q", "q_loaded"

    softmax_threads: int

    @property
    def row_warps(self) -> tuple[int, ...]:
        return self.config.warps.consumers

    @traced("Q to f16")
    @cute.jit
    def _bring_queries(self, context: HopperE4m3DecodeContext, stage: Int32):
        """Bring the rows to f16 in their buffer, with their scales; by the consumers."""
        self._bring_rows(context, stage)
        synchronise(self.softmax_threads)

    def _store_row(
        self,
        context: HopperE4m3DecodeContext,
        row: tuple[int, Int32],
        elements: list[Float32],
        stage: Int32,
    ) -> None:
        """Store this lane's 8 elements of a row: half of a piece of 16, thus of two slices;
        `config` NOTE [order of columns]."""
        lane = cute.arch.lane_idx()
        piece, half = lane // 2, lane % 2
        thread, first_slice = piece % 8 // 2, (piece // 8 * 2 + piece % 2) * 4 + 2 * half
        target = context.smem["q_halves"][row, None, stage]
        for number in range(0, len(elements), 2):
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = elements[number], elements[number + 1]
            rounded = cute.make_rmem_tensor(2, cutlass.Float16)
            rounded.store(pair.load().to(cutlass.Float16))
            of_slice, upper = divmod(number // 2, 2)
            column = (first_slice + of_slice) * 16 + 8 * upper + 2 * thread
            cute.autovec_copy(rounded, columns_of(target, column, 2))
