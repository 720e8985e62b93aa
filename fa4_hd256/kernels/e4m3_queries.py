"""Q of a tile for keys in e4m3: each row is brought to a range of its own by a power of two, so
that it keeps its bits in a type of few exponents; the rows' factors, which bring scores back, lie
beside it in shared memory.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .edges import RingStates
from .limits import HEAD_DIM, WARP_SIZE
from .ranges import traced
from .views import load_lane_columns

__all__ = ["ScaledQueries", "ScaledRows"]

FLOAT_BIAS, FLOAT_MANTISSA = 127, 23
#: Of a row's largest element, as float32 has it, at least: of smaller ones the factor would leave
#: the exponents of a float32.
LEAST_EXPONENT = 32
INFINITE_EXPONENT = 255


class ScaledRows:
    """Mixed into a decode kernel; some warps bring a tile's rows to their ranges, each its share.

    top_exponent: a row's largest element comes to lie in [2^top, 2^(top + 1)).  row_warps: those
    warps, one behind the other.  rows_at_once: rows that a warp works on at a time, at most.  A
    kernel adds `_load_row(context, work, row, stage)`, a lane's elements of a row, and
    `_store_row(context, row, elements, stage)`, these scaled, float32, to shared memory.
    """

    top_exponent: int
    row_warps: tuple[int, ...]
    rows_at_once: int

    config: Any
    _load_row: Any
    _store_row: Any

    @cute.jit
    def _bring_rows(self, context: Any, work: Any, stage: Int32):
        """This warp's rows of a tile to shared memory, and their factors; for the tensor core to
        read when all warps have met."""
        rows, warps = self.config.rows, len(self.row_warps)
        own = cute.arch.thread_idx()[0] // WARP_SIZE - self.row_warps[0]
        # Asked for together: each row by itself would wait for memory.
        at_once = min(self.rows_at_once, rows // warps)
        for group in cutlass.range(rows // (warps * at_once), unroll=1):
            first = (group * warps + own) * at_once
            values = [self._load_row(context, work, first + i, stage) for i in range(at_once)]
            self._rows_are_read()
            for i, elements in enumerate(values):
                self._scale_row(context, first + i, elements, stage)
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()

    def _rows_are_read(self) -> None:
        """Between what a warp reads at a time and what it writes of that."""

    def _scale_row(self, context: Any, row: Any, values: cute.Tensor, stage: Int32) -> None:
        """A row to shared memory, with its factor."""
        elements = values.load().to(Float32)
        elements = [elements[i] for i in range(HEAD_DIM // WARP_SIZE)]
        largest = Int32(0)
        for element in elements:
            # As bits, which order numbers by size, and infinity and NaN above all.
            largest = cutlass.max(largest, _bits(element) & 0x7FFFFFFF)
        largest = cute.arch.warp_redux_sync(largest, "max")
        exponent = cutlass.max(largest >> FLOAT_MANTISSA, LEAST_EXPONENT)
        scale = _float((2 * FLOAT_BIAS + self.top_exponent - exponent) << FLOAT_MANTISSA)
        factor = _float((exponent - self.top_exponent) << FLOAT_MANTISSA)
        # The type may have no infinity: what a row with one comes to is NaN.
        factor = cutlass.select_(exponent == INFINITE_EXPONENT, Float32(math.nan), factor)
        self._store_row(context, row, [element * scale for element in elements], stage)
        # All lanes write the same.
        context.smem["factors"][row, stage] = factor


class ScaledQueries(ScaledRows):
    """The role `quantise`, whose warps read the rows from global memory.

    query_edges: (full, free) of what it fills, first Q's.
    """

    query_edges: tuple[tuple[str, str], ...]

    edges: Any
    dtype: Any
    problem_class: Any
    scheduler: Any
    of_query: int
    queries: Any
    num_steps: Any

    @cute.jit
    def quantise(self, context: Any):
        """Each tile's Q, and the factors of its rows."""
        states = self.edges.waiter_states(*(free for _, free in self.query_edges))
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            if self.num_steps(context, work) > 0:
                states = self._quantise_tile(context, work, states)
            work = scheduler.advance_to_next_work()
        q_free = self.query_edges[0][1]
        for _ in range(self.config.q_stages):
            context.barriers[q_free].wait(states[q_free])
            states.advance(q_free)

    @traced("quantise Q")
    @cute.jit
    def _quantise_tile(self, context: Any, work: Any, states: RingStates):
        barriers, q_free = context.barriers, self.query_edges[0][1]
        for _, free in self.query_edges:
            barriers[free].wait(states[free])
        self._bring_rows(context, work, states[q_free].index)
        for full, free in self.query_edges:
            barriers[full].arrive(states[free])
            states.advance(free)
        return states

    @property
    def row_warps(self) -> tuple[int, ...]:
        return self.config.warps.quantise

    def _load_row(self, context: Any, work: Any, row: Int32, stage: Int32) -> cute.Tensor:
        """This lane's elements of a row of Q; 0 of one that there is not, for which another one is
        read: behind a branch each row's load would be waited for by itself."""
        packed, queries = self.problem_class.packed_heads, context.query(work)
        query, in_group = self.queries(work)[0] + row // self.of_query, row % self.of_query
        exists = (query < queries.length) & (in_group < packed)
        place = queries.offset + cutlass.min(query, queries.length - 1)
        head = work.head * packed + cutlass.min(in_group, packed - 1)
        source = context.tensors.q[place, None, head, queries.batch]
        values = load_lane_columns(source, cute.arch.lane_idx())
        words = cute.recast_tensor(values, Int32)
        for word in range(cute.size(words)):
            words[word] = cutlass.select_(exists, words[word], Int32(0))
        return values


def _bits(value: Float32) -> Int32:
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def _float(bits: Int32) -> Float32:
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )
