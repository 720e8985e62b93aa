"""Results whose tile is 256 rows: 128 of a CTA, a row per thread, half of the columns per
warpgroup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....schedulers.protocol import WorkTile
from ...limits import HEAD_DIM
from ...plan.budgets import TmemPlan
from ...plan.edges import RingRecord, SharedByReference
from ...ranges import traced
from ...rows.sequences import Sequence, columns_of
from ..instructions import fence_after_thread_sync, fence_before_thread_sync
from ..pair_plan import CTAS
from ..tmem import multiply, tmem_load
from .common import FRAGMENT, store_row, warpgroup, zeros
from .common import BlackwellBackwardContext as Context

CTA_ROWS = 128  # rows of a tile that a CTA has, one per lane of tensor memory
TILE_ROWS = CTAS * CTA_ROWS
WARPGROUP_COLUMNS = HEAD_DIM // 2  # columns of the result that one warpgroup drains
WHOLE = (0, WARPGROUP_COLUMNS)


def first_row(context: Context, work: WorkTile) -> Int32:
    return work.block * TILE_ROWS + context.cta_rank * CTA_ROWS


def lane() -> Int32:
    """Return the lane of tensor memory, and the row of the CTA, of this thread."""
    return cute.arch.thread_idx()[0] % CTA_ROWS


class ResultPlace(NamedTuple):
    """Place of a tile's result: tensor, sequence, first row of this CTA, head."""

    result: cute.Tensor
    rows: Sequence
    first_row: Int32
    head: Int32

    def has_row(self) -> Boolean:
        return self.first_row + lane() < self.rows.length

    def row(self) -> cute.Tensor:
        row = self.rows.offset + self.first_row + lane()
        return self.result[row, None, self.head, self.rows.batch]


@dataclass(frozen=True)
class RowResult(SharedByReference):
    """Result of such a tile on its way out of tensor memory. name: of the result, as "dV"; its
    edges and its region have that name in small letters. stages: accumulators, which tiles take in
    turn. is_scaled: the result is softmax_scale times what lies there."""

    name: str
    tmem_plan: TmemPlan
    is_scaled: bool
    stages: int = 1

    def drain(
        self,
        context: Context,
        place: ResultPlace,
        states: RingRecord,
        part: tuple[int, int] = WHOLE,
    ) -> RingRecord:
        """Store the result of a tile.  part: [begin, end) of a warpgroup's columns."""
        return traced(f"drain {self.name}")(self._drain)(context, place, states, part)

    @cute.jit
    def _drain(
        self, context: Context, place: ResultPlace, states: RingRecord, part: tuple[int, int]
    ):
        name, (begin, end) = self.name.lower(), part
        done, free = f"{name}_done", f"{name}_free"
        if cutlass.const_expr(begin == 0):
            context.barriers[done].wait(states[done])
            fence_after_thread_sync()
        exists = place.has_row()
        start, stride = self.tmem_plan.buffers(name, self.stages)
        address = context.warp_lanes + (start + warpgroup() * WARPGROUP_COLUMNS)
        address += states[done].index * stride
        for start in cutlass.range_constexpr(begin, end, FRAGMENT):
            values = cute.make_rmem_tensor(FRAGMENT, Float32)
            tmem_load(address + start, values)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(start + FRAGMENT == WARPGROUP_COLUMNS):
                fence_before_thread_sync()
                context.barriers[free].arrive(states[done], is_converged=True)
            if cutlass.const_expr(self.is_scaled):
                multiply(values, context.scalars.softmax_scale)
            if exists:
                column = warpgroup() * WARPGROUP_COLUMNS + start
                store_row(values, columns_of(place.row(), column, FRAGMENT))
        if cutlass.const_expr(end == WARPGROUP_COLUMNS):
            states.advance(done)
        return states

    @staticmethod
    @cute.jit
    def store_zeros(place: ResultPlace):
        """Store 0 to the rows of a place: of a tile without steps."""
        if place.has_row():
            destination = place.row()
            for start in cutlass.range(0, WARPGROUP_COLUMNS, FRAGMENT, unroll=1):
                column = warpgroup() * WARPGROUP_COLUMNS + start
                store_row(zeros(FRAGMENT), columns_of(destination, column, FRAGMENT))
