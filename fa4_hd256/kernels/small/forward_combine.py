"""The kernel after a forward with split keys: one result from those of the KV splits. Split i of a
row has O_i, divided by its own sum, and LSE_i.  With L = ln sum_i exp(LSE_i) the row's result is
out = sum_i exp(LSE_i - L) O_i and LSE = L (arXiv 2205.14135, algorithm 1, for blocks that are
worked on one after the other).  A part without a visible key has LSE_i = -inf and weighs nothing,
whatever its O_i holds; a row without any has out = 0 and LSE = -inf.  A part with a sink of +inf
has LSE_i = +inf and takes all of the weight.

A lane makes the weight of a part, or of two; then a warp has the columns of a row, 8 a lane, of all
parts, or of some.

NOTE [warps of a row].  Few rows are far fewer warps than a GPU holds, and a warp that reads all of
32 parts takes one round trip to L2 for each `parts_at_once`.  So with more parts several warps of a
CTA share a row: each adds up its own parts, loaded before their weights are known, and from shared
memory the threads add up the sums, in the parts' order.  Where there are fewer rows than SMs,
several CTAs have some columns of a row each, and a warp as many times the parts.  However rows are
shared, the same sums of `parts_at_once` parts are added in the same order: a row's bits do not
depend on how many there are.

NOTE [before the forward ends].  By programmatic dependent launch (PTX ISA 9.7.13.15,
griddepcontrol) its CTAs may be there while the last ones of the forward end, if all of these have
said so; they wait until all that the forward wrote can be seen before they read any of it.  All
would crowd on the SMs that the forward leaves idle, four of 132: where there are no more than SMs,
each takes shared memory of which an SM holds one.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.memory import SmemAllocator

from ...softmax_emu.exp2 import exp2_row_factor
from ..limits import FLOAT_BYTES, WARP_SIZE
from ..problem_class import CallScalars
from ..rows.lanes import LANE_COLUMNS, lane_columns, load_lane_columns
from ..rows.output_gate import by_rows, multiply_by_gate, neighbours, row_of_gate
from ..rows.scheduler_metadata import SchedulerMetadata
from ..rows.sequences import by_sequence, columns_of
from .combine_config import CombineClass, CombineConfig

LOG2_E = math.log2(math.e)
#: Stands for an LSE of +inf: the largest float32.
LARGEST_LSE = 3.4028234663852886e38
#: Shared memory of a CTA, more than half of an SM's.
ALONE_BYTES = 116 << 10


class CombineKernel:
    """Launch with `__call__`, under `cute.compile`. problem_class: dtype of out, and its gate."""

    def __init__(self, config: CombineConfig, problem_class: CombineClass) -> None:
        self.config = config
        self.problem_class = problem_class
        self.dtype = problem_class.element_type

    @cute.jit
    def __call__(
        self,
        parts: tuple[cute.Tensor, cute.Tensor],
        results: tuple[cute.Tensor, ...],
        scalars: CallScalars | None,
        stream: Any,
    ) -> None:
        """parts: (batch * splits, seqlen, heads, 256) and (batch * splits, heads, seqlen), float32,
        the parts of a batch entry one after the other, at most `WARP_SIZE * lane_parts` of them.
        results: out (batch, seqlen, heads, 256) and lse (batch, heads, seqlen) float32, then the
        gate of out, which is read, where the problem class has one."""
        batch, seqlen, heads, _ = results[0].shape
        splits = cute.size(parts[0], mode=[0]) // batch
        sizes = tuple(Int32(size) for size in (seqlen, heads, batch, splits))
        num_warps, rows = self.config.num_warps, self.config.cta_rows
        count = batch * seqlen * heads * self.config.slices
        self.kernel(
            (by_sequence(parts[0]), parts[1]), self.results_by_rows(results), sizes, scalars
        ).launch(
            grid=((count + rows - 1) // rows, 1, 1),
            block=(num_warps * WARP_SIZE, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        parts: tuple[cute.Tensor, cute.Tensor],
        results: tuple[cute.Tensor, ...],
        sizes: tuple[Int32, Int32, Int32, Int32],
        scalars: CallScalars | None,
    ) -> None:
        """A row, or a slice of one, for each `row_warps`; neighbouring rows are neighbouring
        heads."""
        config = self.config
        seqlen, heads, batch, splits = sizes
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index = block * config.cta_rows + warp // config.row_warps
        is_row = index < batch * seqlen * heads * config.slices
        part_of_row = Int32(0)
        if cutlass.const_expr(config.shares_rows):
            # All warps come to the barrier.
            index = cutlass.min(index, batch * seqlen * heads * config.slices - 1)
            part_of_row, index = index % config.slices, index // config.slices
        place = (index // heads % seqlen, index % heads, index // heads // seqlen)
        source = (*place[:2], place[2] * splits, splits)
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(config.shares_rows):
            self._combine_together(parts, results, source, (*place, part_of_row, is_row))
        else:
            self._keep_alone()
            if is_row:
                self.combine_row(parts, results, source, place)

    def results_by_rows(self, results: tuple[cute.Tensor, ...]) -> tuple[cute.Tensor, ...]:
        out, lse, *gate = results
        form = self.problem_class.out_gate
        return by_sequence(out), lse, *(by_rows(form, one) for one in gate)

    def _multiply_by_gate(
        self,
        values: cute.Tensor,
        results: tuple[cute.Tensor, ...],
        place: tuple[Int32, Int32, Int32],
        begin: Int32,
    ) -> None:
        of_row = row_of_gate(self.problem_class.out_gate, results[2], *place)
        multiply_by_gate(values, of_row, neighbours(begin, cute.size(values)))

    def _keep_alone(self) -> None:
        """Shared memory that nobody uses, where one CTA is to have an SM."""
        if self.config.alone:
            SmemAllocator().allocate(ALONE_BYTES)

    @cute.jit
    def combine_row(
        self,
        parts: tuple[cute.Tensor, cute.Tensor],
        results: tuple[cute.Tensor, ...],
        source: tuple[Int32, Int32, Int32, Int32],
        place: tuple[Int32, Int32, Int32],
    ) -> None:
        """One row by one warp.  source: (row, head, its first part, of how many); place: (row,
        head, batch entry) of the results."""
        row, head, batch = place
        part_out, part_lse = parts
        out, lse = results[:2]
        lane, at_once = cute.arch.lane_idx(), self.config.parts_at_once
        own = self._own_lses(part_lse, source)
        weights, total = self._weights(own)
        sums = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        sums.fill(0.0)
        for start in cutlass.range(0, source[3], at_once, unroll=1):
            loaded = self._load_turn(part_out, source, start)
            self._add_turn(sums, loaded, (weights, own), start)
        if cutlass.const_expr(self.problem_class.out_gate):
            self._multiply_by_gate(sums, results, place, lane * LANE_COLUMNS)
        rounded = cute.make_rmem_tensor(LANE_COLUMNS, self.dtype)
        rounded.store(sums.load().to(self.dtype))
        cute.autovec_copy(rounded, lane_columns(out[row, None, head, batch], lane))
        if lane == 0:
            lse[batch, head, row] = total

    @cute.jit
    def _combine_together(
        self,
        parts: tuple[cute.Tensor, cute.Tensor],
        results: tuple[cute.Tensor, ...],
        source: tuple[Int32, Int32, Int32, Int32],
        which: tuple[Int32, Int32, Int32, Int32, Boolean],
    ) -> None:
        """A row, or slice, by `row_warps`.  which: (row, head, batch, slice, whether it exists)."""
        row, head, batch, part_of_row, is_row = which
        part_out, part_lse = parts
        out, lse = results[:2]
        config, lane = self.config, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        turns = config.num_warps * config.slices
        nbytes = turns * config.columns * FLOAT_BYTES
        memory = SmemAllocator().allocate(max(nbytes, ALONE_BYTES if config.alone else 0), 128)
        of_turns = cute.make_tensor(
            cute.recast_ptr(memory, dtype=Float32), cute.make_layout((config.columns, turns))
        )
        # So many lanes have the columns of a split.
        lanes = WARP_SIZE // config.slices
        start = warp % config.row_warps * config.warp_parts
        # The longest loads come first: O of the splits, then their weights.
        loaded = self._load_turn(part_out, source, start, part_of_row)
        own = self._own_lses(part_lse, source)
        weights, total = self._weights(own)
        sums = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        sums.fill(0.0)
        self._add_turn(sums, loaded, (weights, own), start)
        turn = warp * config.slices + lane // lanes
        cute.autovec_copy(sums, lane_columns(of_turns[None, turn], lane % lanes))
        cute.arch.sync_threads()
        columns = max(1, config.columns // (config.row_warps * WARP_SIZE))
        thread = cute.arch.thread_idx()[0] % (config.row_warps * WARP_SIZE)
        of_row = config.row_warps * config.slices
        first = warp // config.row_warps * of_row
        if is_row & (thread < config.columns // columns):
            found = cute.make_rmem_tensor(columns, Float32)
            found.fill(0.0)
            for other in range(of_row):
                values = cute.make_rmem_tensor(columns, Float32)
                of_turn = columns_of(of_turns[None, first + other], thread * columns, columns)
                cute.autovec_copy(of_turn, values)
                for column in range(columns):
                    found[column] = found[column] + values[column]
            if cutlass.const_expr(self.problem_class.out_gate):
                column = part_of_row * config.columns + thread * columns
                self._multiply_by_gate(found, results, which[:3], column)
            rounded = cute.make_rmem_tensor(columns, self.dtype)
            rounded.store(found.load().to(self.dtype))
            begin = part_of_row * config.columns + thread * columns
            cute.autovec_copy(rounded, columns_of(out[row, None, head, batch], begin, columns))
        if is_row & (thread == 0) & (part_of_row == 0):
            lse[batch, head, row] = total

    def _load_turn(
        self,
        part_out: cute.Tensor,
        source: tuple[Int32, Int32, Int32, Int32],
        start: Int32,
        part_of_row: Any = 0,
    ) -> list[cute.Tensor]:
        """Load this lane's columns of `parts_at_once` parts. start: the warp's first part of them.
        part_of_row: number of the slice. A part past the last is replaced by it, with no weight: no
        branch parts the loads."""
        row, head, first, splits = source
        lanes = WARP_SIZE // self.config.slices
        lane = part_of_row * lanes + cute.arch.lane_idx() % lanes
        return [
            load_lane_columns(
                part_out[row, None, head, first + cutlass.min(part, splits - 1)], lane
            )
            for part in self._parts_of_lane(start)
        ]

    def _parts_of_lane(self, start: Int32) -> list[Int32]:
        """Numbers of the parts that this lane reads in an iteration; `start`: of its warp's
        first."""
        slices, at_once = self.config.slices, self.config.parts_at_once
        if slices > 1:
            start = start + cute.arch.lane_idx() // (WARP_SIZE // slices) * at_once
        return [start + i for i in range(at_once)]

    def _add_turn(
        self,
        sums: cute.Tensor,
        loaded: list,
        of_lanes: tuple[list[Float32], list[Float32]],
        start: Int32,
    ) -> None:
        """sums += weight * O of the parts of an iteration.  of_lanes: (weights, LSEs) of each
        lane's parts; past the last they are 0 and -inf."""
        # The parts of an iteration are those of neighbouring lanes.
        weight, lse = (self._of_turn(values, start) for values in of_lanes)
        for owner, values in zip(self._parts_of_lane(start), loaded, strict=True):
            if cutlass.const_expr(self.config.lane_parts > 1):
                owner = owner % WARP_SIZE
            factor = cute.arch.shuffle_sync(weight, owner)
            # Not where the weight is 0: the row may see a NaN whose weight underflows.
            is_void = cute.arch.shuffle_sync(lse, owner) == Float32(-math.inf)
            for column in range(LANE_COLUMNS):
                value = cutlass.select_(is_void, Float32(0.0), values[column])
                sums[column] = cute.math.fma(factor, value, sums[column])

    def _of_turn(self, values: list, start: Int32) -> Float32:
        found = values[0]
        for number in range(1, len(values)):
            found = cutlass.select_(start >= number * WARP_SIZE, values[number], found)
        return found

    def _own_lses(
        self, part_lse: cute.Tensor, source: tuple[Int32, Int32, Int32, Int32]
    ) -> list[Float32]:
        return [
            self._own_lse(part_lse, source, number * WARP_SIZE)
            for number in range(self.config.lane_parts)
        ]

    def _own_lse(
        self, part_lse: cute.Tensor, source: tuple[Int32, Int32, Int32, Int32], begin: int
    ) -> Float32:
        """LSE of this lane's part times log2(e); -inf without one."""
        row, head, first, splits = source
        part = cute.arch.lane_idx() + begin if begin else cute.arch.lane_idx()
        own = part_lse[first + cutlass.min(part, splits - 1), head, row] * LOG2_E
        # An LSE of +inf, by a sink, has differences to others; NaN stays.
        own = cutlass.select_(own == Float32(math.inf), Float32(LARGEST_LSE), own)
        return cutlass.select_(part < splits, own, Float32(-math.inf))

    def _weights(self, own: list[Float32]) -> tuple[list[Float32], Float32]:
        """Return ([exp(LSE - L) for each of this lane's parts], L) from `_own_lse`."""
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
        is_full = (largest == Float32(LARGEST_LSE)) & (total > Float32(0.0))
        lse = cutlass.select_(is_full, Float32(math.inf), lse)
        return [weight * inverse for weight in weights], lse


class RaggedCombineKernel(CombineKernel):
    """The kernel after a forward whose KV splits are listed (`rows.scheduler_metadata`): a warp per
    row, too, for sequences of different numbers of parts.  Launch with `__call__`, under
    `cute.compile`.

    problem_class: dtype of out, and whether its rows are packed. Raises ValueError for a
    configuration in which warps share rows: how many parts a row has is not known.
    """

    def __init__(self, config: CombineConfig, problem_class: CombineClass) -> None:
        if config.shares_rows:
            raise ValueError("warps share rows; accepted: a warp for each row")
        super().__init__(config, problem_class)

    @cute.jit
    def __call__(
        self,
        parts: tuple[cute.Tensor, cute.Tensor],
        results: tuple[cute.Tensor, ...],
        lists: tuple[cute.Tensor, ...],
        scalars: CallScalars | None,
        stream: Any,
    ) -> None:
        """parts: (parts, max_seqlen_q, heads, 256) and (parts, heads, max_seqlen_q), float32, of
        which a sequence has those that are listed, at most `WARP_SIZE * lane_parts`.  results: out
        (batch, seqlen, heads, 256) and lse (batch, heads, seqlen) float32; packed sequences have a
        batch of 1.  lists: the scheduler metadata and cu_seqlens_q where sequences are packed,
        int32."""
        num_parts, seqlen, heads, _ = parts[0].shape
        listed = SchedulerMetadata(lists[0], num_parts)
        batch = listed.num_sequences
        sizes = tuple(Int32(size) for size in (seqlen, heads, batch, num_parts))
        count = batch * seqlen * heads
        rows = self.config.cta_rows
        self.ragged_kernel(
            (by_sequence(parts[0]), parts[1]), self.results_by_rows(results), sizes, lists, scalars
        ).launch(
            grid=((count + rows - 1) // rows, 1, 1),
            block=(self.config.num_warps * WARP_SIZE, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def ragged_kernel(
        self,
        parts: tuple[cute.Tensor, cute.Tensor],
        results: tuple[cute.Tensor, ...],
        sizes: tuple[Int32, ...],
        lists: tuple[cute.Tensor, ...],
        scalars: CallScalars | None,
    ) -> None:
        """A row for each warp; neighbouring rows are neighbouring heads."""
        seqlen, heads, batch, num_parts = sizes
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index = block * self.config.cta_rows + warp
        cute.arch.griddepcontrol_wait()
        if index < batch * seqlen * heads:
            row, head, entry = index // heads % seqlen, index % heads, index // heads // seqlen
            listed = SchedulerMetadata(lists[0], num_parts)
            first, count = listed.of_sequence(entry)
            offset, length, in_results = Int32(0), seqlen, entry
            if cutlass.const_expr(self.problem_class.packed):
                offset, in_results = lists[1][entry], Int32(0)
                length = lists[1][entry + 1] - offset
            if row < length:
                source, place = (row, head, first, count), (offset + row, head, in_results)
                if listed.is_for(heads):
                    self.combine_row(parts, results, source, place)
                else:
                    self._refuse_row(results, place)

    @cute.jit
    def _refuse_row(
        self, results: tuple[cute.Tensor, ...], place: tuple[Int32, Int32, Int32]
    ) -> None:
        """NaN in one row.  place: (row, head, batch entry)."""
        (out, lse), (row, head, batch) = results[:2], place
        values = cute.make_rmem_tensor(LANE_COLUMNS, self.dtype)
        values.fill(math.nan)
        cute.autovec_copy(values, lane_columns(out[row, None, head, batch], cute.arch.lane_idx()))
        if cute.arch.lane_idx() == 0:
            lse[batch, head, row] = Float32(math.nan)
