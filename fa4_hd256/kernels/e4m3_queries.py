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
    """Mixed into a decode kernel; a warp brings rows to their ranges.

    top_exponent: a row's largest element comes to lie in [2^top, 2^(top + 1)).  A kernel adds
    `_store_row(context, row, elements, stage)`, a lane's scaled elements of a row, float32, to
    shared memory.
    """

    top_exponent: int

    _store_row: Any

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
    """The role `quantise`, whose warps read the rows from global memory, each its share of a tile.

    rows_at_once: rows that a warp works on at a time, at most.  query_edges: (full, free) of what
    it fills, first Q's.
    """

    rows_at_once: int
    query_edges: tuple[tuple[str, str], ...]

    config: Any
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
        warps = self.config.warps.quantise
        own = cute.arch.thread_idx()[0] // WARP_SIZE - warps[0]
        at_once = self._at_once()
        for group in cutlass.range(self.config.rows // (at_once * len(warps)), unroll=1):
            first = (group * len(warps) + own) * at_once
            rows = [self._load_row(context, work, first + i) for i in range(at_once)]
            for i, values in enumerate(rows):
                self._scale_row(context, first + i, values, states[q_free].index)
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()
        for full, free in self.query_edges:
            barriers[full].arrive(states[free])
            states.advance(free)
        return states

    def _at_once(self) -> int:
        """Rows of a warp that are asked for together: each by itself would wait for memory."""
        return min(self.rows_at_once, self.config.rows // len(self.config.warps.quantise))

    def _load_row(self, context: Any, work: Any, row: Int32) -> cute.Tensor:
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
