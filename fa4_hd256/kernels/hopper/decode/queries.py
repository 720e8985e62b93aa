"""Q of a tile: the rows come by TMA, and the consumers bring them to f16 where they lie.

NOTE [Q in place].  A tile's first product waits for Q, which nothing can be done for: all of its
rows are asked for at once, by a warp of its own, so that they take one latency of memory, beside
that of the first K.  Each warp of the consumers then has its share of the rows: a row in f16 has
the bytes that it has had, though not in the same order, so a warp reads its rows, and writes them
when all of its lanes have read.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_hd256.kernels.decode_softmax import synchronise
from fa4_hd256.kernels.e4m3_queries import ScaledRows
from fa4_hd256.kernels.edges import RingState
from fa4_hd256.kernels.limits import HEAD_DIM, WARP_SIZE
from fa4_hd256.kernels.operands import load_tile
from fa4_hd256.kernels.ranges import traced
from fa4_hd256.kernels.views import columns_of, lane_columns

__all__ = ["QueryRows"]


class QueryRows(ScaledRows):
    """Mixed into the decode kernel; the shared state is its `Context`."""

    top_exponent = 14
    rows_at_once = 4  # more take registers that a warp has not

    dtype: Any
    edges: Any
    scheduler: Any
    of_query: int
    queries: Any
    num_steps: Any
    softmax_threads: int

    @property
    def row_warps(self) -> tuple[int, ...]:
        return self.config.warps.consumers

    @cute.jit
    def load_queries(self, context: Any):
        """Each tile's rows, as they are; one warp."""
        state = self.edges["q_free"].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            own_context = context.of_tile(work)
            if self.num_steps(own_context, work) > 0:
                state = self._load_rows(own_context, work, state)
            work = scheduler.advance_to_next_work()
        # Every buffer must be free before this CTA may exit: its barriers are still signalled.
        for _ in range(self.config.q_stages):
            context.barriers["q_free"].wait(state)
            state.advance()

    @traced("load Q")
    @cute.jit
    def _load_rows(self, context: Any, work: Any, state: RingState):
        loaded = context.barriers["q_loaded"]
        context.barriers["q_free"].wait(state)
        loaded.expect_bytes(state)
        place = context.query(work), self.queries(work)[0], 0, work.head
        load_tile(
            context.tensors.q, context.smem["q"], place, loaded.pointer(state), state.index,
            self.of_query,
        )  # fmt: skip
        state.advance()
        return state

    @traced("Q to f16")
    @cute.jit
    def _bring_queries(self, context: Any, work: Any, stage: Int32):
        """The rows in f16 in their buffer, NOTE [Q in place], and their factors; by the
        consumers."""
        self._bring_rows(context, work, stage)
        synchronise(self.softmax_threads)

    def _rows_are_read(self) -> None:
        cute.arch.sync_warp()

    def _load_row(self, context: Any, work: Any, row: Int32, stage: Int32) -> cute.Tensor:
        """This lane's 8 elements of a row as it was loaded."""
        values = cute.make_rmem_tensor(HEAD_DIM // WARP_SIZE, self.dtype)
        source = context.smem["q"][row, None, stage]
        cute.autovec_copy(lane_columns(source, cute.arch.lane_idx()), values)
        return values

    def _store_row(self, context: Any, row: Any, elements: list[Float32], stage: Int32) -> None:
        """This lane's 8 elements of a row: half of a piece of 16, thus of two slices; `config` NOTE
        [order of columns]."""
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
