"""Q of a tile for keys in e4m3: each row is brought to a range of its own by a power of two, so
that it keeps its bits in a type of few exponents; the rows' scales, which bring scores back, lie
beside it in shared memory.

NOTE [Q in place].  A tile's first MMA waits for Q, which nothing can be done for.  All of its rows
are loaded at once, by TMA, so that they take one latency of memory, beside that of the first K.
Each of some warps then has its share of the rows.  A row has as many bytes behind as before, and
the same ones, though in another order: so a warp reads its rows, and writes them when all of its
lanes have read.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..limits import HEAD_DIM, WARP_SIZE
from ..operands import ATOM_ROWS, load_tile
from ..plan.edges import RingState
from ..ranges import traced
from ..rows.views import lane_columns
from .context import ForwardContext

__all__ = ["ScaledRows"]

FLOAT_BIAS, FLOAT_MANTISSA = 127, 23
#: Least exponent of a row's largest element, as float32 has it: the scale of smaller ones would
#: leave the exponents of a float32.
LEAST_EXPONENT = 32
INFINITE_EXPONENT = 255


class ScaledRows:
    """Mixed into a decode kernel: the role of a warp that loads Q, and how others bring a tile's
    rows to their ranges, each its share.

    top_exponent: a row's largest element comes to lie in [2^top, 2^(top + 1)).  row_warps: those
    warps, one behind the other.  rows_at_once: rows that a warp works on at a time, at most.
    rows_memory, rows_edge: the kernel's view of shared memory that the rows come to, and the edge
    that says so; q_free says that they may.  A kernel adds
    `_store_row(context, row, elements, stage)`, a lane's elements of a row, scaled, float32, to
    shared memory.  A row is its place in an atom of the swizzle and the atom's number.
    """

    top_exponent: int
    rows_at_once: int
    rows_memory: str
    rows_edge: str

    config: Any
    dtype: Any
    edges: Any
    scheduler: Any
    of_query: int
    queries: Any
    num_steps: Any
    _store_row: Any

    @property
    def row_warps(self) -> tuple[int, ...]:
        raise NotImplementedError

    @cute.jit
    def load_queries(self, context: ForwardContext):
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
    def _load_rows(self, context: ForwardContext, work: Any, state: RingState):
        loaded, memory = context.barriers[self.rows_edge], context.smem[self.rows_memory]
        context.barriers["q_free"].wait(state)
        loaded.expect_bytes(state)
        place = context.query(work), self.queries(work)[0], 0, work.head
        barrier = loaded.pointer(state)
        load_tile(context.tensors.q, memory, place, barrier, state.index, self.of_query)
        state.advance()
        return state

    @cute.jit
    def _bring_rows(self, context: ForwardContext, stage: Int32):
        """Bring this warp's loaded rows of a tile to their ranges, with their scales; for the
        tensor core to read when all warps have met."""
        rows, warps = self.config.rows, len(self.row_warps)
        own = cute.arch.thread_idx()[0] // WARP_SIZE - self.row_warps[0]
        at_once = min(self.rows_at_once, rows // warps)
        if cutlass.const_expr(rows // warps < ATOM_ROWS):
            shares = ATOM_ROWS // at_once
            self._bring_some(context, own % shares * at_once, own // shares, at_once, stage)
        else:
            for turn in cutlass.range(rows // warps // ATOM_ROWS, unroll=1):
                # Places in an atom are known when the kernel is compiled: addresses are cheap.
                for first in range(0, ATOM_ROWS, at_once):
                    self._bring_some(context, first, turn * warps + own, at_once, stage)
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()

    def _bring_some(
        self, context: ForwardContext, first: Any, atom: Any, count: int, stage: Int32
    ) -> None:
        """Rows from `first` on of the rows of an atom of the swizzle."""
        rows = [(first + i, atom) for i in range(count)]
        values = [self._load_row(context, row, stage) for row in rows]
        cute.arch.sync_warp()
        for row, elements in zip(rows, values, strict=True):
            self._scale_row(context, row, elements, stage)

    def _load_row(self, context: ForwardContext, row: tuple[Any, Any], stage: Int32) -> cute.Tensor:
        """Load this lane's elements of a row as it was loaded."""
        values = cute.make_rmem_tensor(HEAD_DIM // WARP_SIZE, self.dtype)
        source = context.smem[self.rows_memory][row, None, stage]
        cute.autovec_copy(lane_columns(source, cute.arch.lane_idx()), values)
        return values

    def _as_floats(self, values: cute.Tensor) -> list[Float32]:
        if self.dtype is not cutlass.BFloat16:
            elements = values.load().to(Float32)
            return [elements[i] for i in range(HEAD_DIM // WARP_SIZE)]
        # A word has two, each the upper half of a float32.
        words = cute.recast_tensor(values, Int32)
        halves = ((words[i] << 16, words[i] & -(1 << 16)) for i in range(cute.size(words)))
        return [_float(half) for pair in halves for half in pair]

    def _multiplied(self, elements: list[Float32], scale: Float32) -> list[Float32]:
        return [element * scale for element in elements]

    def _scale_row(
        self, context: ForwardContext, row: tuple[Any, Any], values: cute.Tensor, stage: Int32
    ) -> None:
        """Store a row to shared memory, with its scale."""
        elements = self._as_floats(values)
        pairs = [_larger(*elements[i : i + 2]) for i in range(0, len(elements), 2)]
        # Infinity is the largest; NaN, which is not seen here, stays NaN in the row itself.
        while len(pairs) > 1:
            pairs = [_larger(*pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
        largest = _bits(pairs[0])
        largest = cute.arch.warp_redux_sync(largest, "max")
        exponent = cutlass.max(largest >> FLOAT_MANTISSA, LEAST_EXPONENT)
        scale = _float((2 * FLOAT_BIAS + self.top_exponent - exponent) << FLOAT_MANTISSA)
        factor = _float((exponent - self.top_exponent) << FLOAT_MANTISSA)
        # The type may have no infinity: what a row with one comes to is NaN.
        factor = cutlass.select_(exponent == INFINITE_EXPONENT, Float32(math.nan), factor)
        self._store_row(context, row, self._multiplied(elements, scale), stage)
        # All lanes write the same.
        place, atom = row
        context.smem["factors"][atom * ATOM_ROWS + place, stage] = factor


def _larger(first: Float32, second: Float32) -> Float32:
    """The larger of the absolute values; of a number and NaN the number."""
    return cute.arch.fmax(cute.math.absf(first), cute.math.absf(second))


def _bits(value: Float32) -> Int32:
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def _float(bits: Int32) -> Float32:
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )
