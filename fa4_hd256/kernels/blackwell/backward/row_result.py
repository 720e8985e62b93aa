"""Kernels with one result whose tile is 256 rows: 128 of a CTA, a row per thread, half of the
columns per warpgroup."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...limits import HEAD_DIM
from ...ranges import traced
from ...rows.sequences import Sequence
from ...rows.views import columns_of
from ..instructions import (
    fence_after_thread_sync,
    fence_before_thread_sync,
)
from ..pair_plan import CTAS
from ..tmem import multiply, tmem_load
from .common import FRAGMENT, BlackwellBackward, store_row, zeros
from .context import BlackwellBackwardContext

__all__ = ["OWN_COLUMNS", "OWN_ROWS", "RowResult"]

OWN_ROWS = 128  # rows of a tile that a CTA has, one per lane of tensor memory
TILE_ROWS = CTAS * OWN_ROWS
OWN_COLUMNS = HEAD_DIM // 2  # columns of the result that one warpgroup drains
WHOLE = (0, OWN_COLUMNS)

#: Place of a tile's result: (tensor, sequence of its rows, first row of this CTA, head).
ResultPlace = tuple[cute.Tensor, Sequence, Int32, Int32]


class RowResult(BlackwellBackward):
    """Base of such a kernel: how its result leaves.

    A kernel adds `result`, its content in the steps, the ring and the region of tensor memory being
    the same in small letters; `is_scaled`, whether it is softmax_scale times what lies there; and
    `result_rows(context, work)`, the `Sequence` of its rows.
    """

    result: str
    is_scaled: bool
    result_rows: Any

    def first_row(self, context: BlackwellBackwardContext, work: Any) -> Int32:
        """The first row of this CTA's half of a tile."""
        return work.block * TILE_ROWS + context.cta_rank * OWN_ROWS

    @staticmethod
    def lane() -> Int32:
        """The lane of tensor memory, and the row of the CTA, of this thread."""
        return cute.arch.thread_idx()[0] % OWN_ROWS

    def place(self, context: BlackwellBackwardContext, work: Any) -> ResultPlace:
        """Return (tensor, `Sequence` of its rows, first row of this CTA, head) of a tile's
        result."""
        result, rows = context.tensors.results[0], self.result_rows(context, work)
        return result, rows, self.first_row(context, work), work.head

    def drain(
        self,
        context: BlackwellBackwardContext,
        work: Any,
        states: Any,
        part: tuple[int, int] = WHOLE,
    ) -> Any:
        """The result of a tile to global memory.  part: [begin, end) of a warpgroup's columns; such
        parts, one after the other, make the whole."""
        return self.drain_to(context, self.place(context, work), states, part)

    def drain_to(
        self,
        context: BlackwellBackwardContext,
        place: ResultPlace,
        states: Any,
        part: tuple[int, int] = WHOLE,
    ) -> Any:
        """Drain the result to its place, as a traced event."""
        return traced(f"drain {self.result}")(self._drain)(context, place, states, part)

    @cute.jit
    def _drain(
        self,
        context: BlackwellBackwardContext,
        place: ResultPlace,
        states: Any,
        part: tuple[int, int],
    ):
        name, (begin, end) = self.result.lower(), part
        done, free = f"{name}_done", f"{name}_free"
        if cutlass.const_expr(begin == 0):
            context.barriers[done].wait(states[done])
            fence_after_thread_sync()
        exists = self._has_row(place)
        start, stride = self.tmem_plan.buffers(name, self.edges[done].stages)
        address = context.own_lanes + (start + self.warpgroup() * OWN_COLUMNS)
        address += states[done].index * stride
        for start in cutlass.range_constexpr(begin, end, FRAGMENT):
            values = cute.make_rmem_tensor(FRAGMENT, cutlass.Float32)
            tmem_load(address + start, values)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(start + FRAGMENT == OWN_COLUMNS):
                fence_before_thread_sync()
                context.barriers[free].arrive(states[done], is_converged=True)
            if cutlass.const_expr(self.is_scaled):
                multiply(values, context.scalars.softmax_scale)
            if exists:
                destination = self._destination(place)
                column = self.warpgroup() * OWN_COLUMNS + start
                store_row(values, columns_of(destination, column, FRAGMENT))
        if cutlass.const_expr(end == OWN_COLUMNS):
            states.advance(done)
        return states

    def _has_row(self, place: ResultPlace) -> Boolean:
        """Return True if this thread's row exists."""
        _, sequence, first_row, _ = place
        return first_row + self.lane() < sequence.length

    def _destination(self, place: ResultPlace) -> cute.Tensor:
        """The 256 elements of this thread's row of the result."""
        result, sequence, first_row, head = place
        return result[sequence.offset + first_row + self.lane(), None, head, sequence.batch]

    def store_zeros(self, context: BlackwellBackwardContext, work: Any) -> None:
        """A result of 0 for the rows of a tile without steps."""
        self.zero(self.place(context, work))

    @cute.jit
    def zero(self, place: ResultPlace):
        """Store 0 to the rows of a place."""
        if self._has_row(place):
            destination = self._destination(place)
            for start in cutlass.range(0, OWN_COLUMNS, FRAGMENT, unroll=1):
                column = self.warpgroup() * OWN_COLUMNS + start
                store_row(zeros(FRAGMENT), columns_of(destination, column, FRAGMENT))
