"""The kernel after a forward whose KV splits are listed (`kernels.rows.part_list`): as
`forward_combine`, a warp per row, for sequences of different numbers of parts."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..limits import WARP_SIZE
from ..problem_class import CombineClass
from ..rows.part_list import PartList
from ..rows.views import LANE_COLUMNS, by_sequence, lane_columns
from .combine_config import CombineConfig
from .forward_combine import CombineKernel

__all__ = ["RaggedCombineKernel"]


class RaggedCombineKernel(CombineKernel):
    """Launch with `__call__`, under `cute.compile`.

    problem_class: dtype of out, and whether its rows are packed. Raises ValueError for a
    configuration in which warps share rows: how many parts a row has is not known.
    """

    def __init__(self, config: CombineConfig, problem_class: CombineClass) -> None:
        if config.shares_rows:
            raise ValueError("warps share rows; accepted: a warp for each row")
        super().__init__(config, problem_class.element_type)
        self.problem_class = problem_class

    @cute.jit
    def __call__(
        self,
        parts: tuple[cute.Tensor, cute.Tensor],
        results: tuple[cute.Tensor, cute.Tensor],
        lists: tuple[cute.Tensor, ...],
        stream: Any,
    ):
        """parts: (parts, max_seqlen_q, heads, 256) and (parts, heads, max_seqlen_q), float32, of
        which a sequence has those that are listed, at most `WARP_SIZE * lane_parts`.  results: out
        (batch, seqlen, heads, 256) and lse (batch, heads, seqlen) float32; packed sequences have a
        batch of 1.  lists: the scheduler metadata and cu_seqlens_q where sequences are packed,
        int32."""
        num_parts, seqlen, heads, _ = parts[0].shape
        listed = PartList(lists[0], num_parts)
        batch = listed.num_sequences
        sizes = tuple(Int32(size) for size in (seqlen, heads, batch, num_parts))
        count = batch * seqlen * heads
        rows = self.config.cta_rows
        self.ragged_kernel(
            (by_sequence(parts[0]), parts[1]), (by_sequence(results[0]), results[1]), sizes, lists
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
        results: tuple[cute.Tensor, cute.Tensor],
        sizes: tuple[Int32, ...],
        lists: tuple[cute.Tensor, ...],
    ):
        """A row for each warp; neighbouring rows are neighbouring heads."""
        seqlen, heads, batch, num_parts = sizes
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index = block * self.config.cta_rows + warp
        cute.arch.griddepcontrol_wait()
        if index < batch * seqlen * heads:
            row, head, entry = index // heads % seqlen, index % heads, index // heads // seqlen
            listed = PartList(lists[0], num_parts)
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
        self, results: tuple[cute.Tensor, cute.Tensor], place: tuple[Int32, Int32, Int32]
    ):
        """NaN in one row.  place: (row, head, batch entry)."""
        (out, lse), (row, head, batch) = results, place
        values = cute.make_rmem_tensor(LANE_COLUMNS, self.dtype)
        values.fill(math.nan)
        cute.autovec_copy(values, lane_columns(out[row, None, head, batch], cute.arch.lane_idx()))
        if cute.arch.lane_idx() == 0:
            lse[batch, head, row] = Float32(math.nan)
