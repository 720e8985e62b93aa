"""The two warpgroups of the decode kernel, each with keys of its own, and one result of both.

NOTE [merge].  A warpgroup's O^T and sums are relative to its own offsets of the rows.  At a tile's
end both go over to the smaller offset of each row, which is that of the larger maximum.  Then each
gives the other half of its columns and adds what it gets to its own half: threads of the same place
in both have the same rows and columns, so what one writes at its place the other reads there.  It
lies where P does, which no product reads any more.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_hd256.kernels.decode_softmax import BARRIER, synchronise
from fa4_hd256.kernels.hopper.instructions import WARPGROUP_THREADS, rows_of
from fa4_hd256.kernels.limits import WARP_SIZE
from fa4_hd256.kernels.ranges import traced
from softmax_emu.exp2 import exp2_row_factor

__all__ = ["MergedHalves"]

WARPGROUPS = 2
VECTOR = 4  # elements that a thread stores at once
TURNS = 2  # of an accumulator: as much as fits where P lies


class MergedHalves:
    """Mixed into the decode kernel; the shared state is its `Context`."""

    config: Any
    own_rows: int
    softmax_threads: int
    _row: Any
    _read: Any
    _multiply_columns: Any

    def _warpgroup(self) -> Int32:
        return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP_THREADS)

    def _own_barrier(self) -> Int32:
        """Of the warpgroup."""
        return self._warpgroup() + (BARRIER + 1)

    def _meet(self, context: Any) -> None:
        """All threads of the warpgroup."""
        synchronise(WARPGROUP_THREADS, self._own_barrier())

    @cute.jit
    def _share_offsets(self, context: Any, softmax: Any):
        """Offsets of the warpgroup's rows, alike in all of its warps, to shared memory."""
        thread = cute.arch.thread_idx()[0]
        if thread % WARPGROUP_THREADS < WARP_SIZE:
            for number in cutlass.range_constexpr(self.own_rows):
                place = self._row(number), self._warpgroup()
                context.smem["offsets"][place] = softmax.offsets[number]

    def _take_offsets(self, context: Any, softmax: Any) -> None:
        """Offsets for a step: between steps they take no registers."""
        found = self._read(context.smem["offsets"], self._warpgroup())
        for number in range(self.own_rows):
            softmax.offsets[number] = found[number]

    @traced("merge")
    def _merge(self, context: Any, softmax: Any):
        """One O^T, of whose accumulators each warpgroup has two: those of its 128 columns; NOTE
        [merge]."""
        synchronise(self.softmax_threads)
        shared, own = context.smem["offsets"], self._warpgroup()
        columns = [values for accumulator in softmax.o for values in rows_of(accumulator)]
        # Row by row: beside O there are no registers for all of them.
        for number in range(self.own_rows):
            row = self._row(number)
            merged = cute.arch.fmin(shared[row, 0], shared[row, 1])
            factor = exp2_row_factor(merged - shared[row, own])
            softmax.offsets[number] = merged
            softmax.sums[number] = softmax.sums[number] * factor
            for values in columns:
                values[number] = values[number] * factor
        for number in range(2):
            for turn in range(TURNS):
                self._exchange(context, softmax.o[number], softmax.o[2 + number], turn)

    def _exchange(self, context: Any, kept: cute.Tensor, given: cute.Tensor, turn: int) -> None:
        """A part of an accumulator to the other warpgroup, and its part of the same added."""
        place = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        own, other = (
            context.smem["halves"][None, place, None, area]
            for area in (self._warpgroup(), 1 - self._warpgroup())
        )
        count = cute.size(kept) // TURNS
        vectors = range(turn * count, (turn + 1) * count, VECTOR)
        values = cute.make_rmem_tensor(VECTOR, Float32)
        for number, start in enumerate(vectors):
            for i in range(VECTOR):
                values[i] = given[start + i]
            cute.autovec_copy(values, own[None, number])
        synchronise(self.softmax_threads)
        for number, start in enumerate(vectors):
            cute.autovec_copy(other[None, number], values)
            for i in range(VECTOR):
                kept[start + i] = kept[start + i] + values[i]
        synchronise(self.softmax_threads)
