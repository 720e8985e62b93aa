"""Base of the forward kernels of all architectures: their tensors, tiles and results.

NOTE [packed heads].  Where a group of query heads divides a CTA's rows, row r of them is query r //
group of head r % group: they read the same keys.  Tiles of a few rows take any group, each query as
many rows as the next power of two.  A causal tile then spans fewer queries, so less of it is
masked, and a few queries with many heads fill it.  TMA gathers the rows of Q through a tensor with
one dimension more.

NOTE [split keys].  Where there are fewer tiles than CTAs to work on them, the KV tiles of a query
tile may be split among several: the scheduler then counts `num_splits` batch entries for each one,
and each split leaves its own O, in float32 and divided by its own sum, and its own LSE, from which
`forward_combine` makes the result.  The sink is the first split's.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...schedulers.order import PackedBlocks, TileProblem, section_heads_for
from ..context import KernelParts
from ..functions.kernel_functions import KernelFunctions
from ..limits import ELEMENT_BYTES, HEAD_DIM
from ..mask.block_mask import MASK_TILE, StepList
from ..operands import TmaTensor, smem_layout
from ..problem_class import CallScalars, OptionalTensors, query_rows
from ..rows.output_gate import by_rows
from ..rows.sequences import (
    by_packed_heads,
    by_sequence,
    clipped_at_start,
    clipped_view,
)
from .context import ForwardContext as Context
from .context import ForwardKernelTensors
from .keys import KeySource


class ForwardCommon:
    """Base: host code of a forward kernel.

    A kernel has `problem_class`, `config`, `parts`, `scheduler`, `warps`; `tile_queries`, the
    queries of a tile; `load_keys`, the fewest keys of a load of K or V; `kernel_tensors(operands,
    lse, optional)`, TMA descriptors and the plain tensors of (q, k, v, out) by (seqlen, 256, heads,
    batch); and `kernel(tensors, sizes, scalars, order)`.  q_bytes, kv_bytes: of an element of Q,
    and of K or V; single bytes come in twos, as elements of the type of out.
    """

    q_bytes = kv_bytes = ELEMENT_BYTES
    problem_class: Any
    config: Any
    tile_queries: int
    load_keys: int
    parts: KernelParts
    scheduler: Any
    warps: Any
    kernel: Any
    kernel_tensors: Any

    def allow_next(self) -> None:
        """Let the combining kernel begin, with split keys: `forward_combine` NOTE [before the
        forward ends].  A grid whose clusters may be cancelled does not (docs/silicon.md,
        `clc-dependents`)."""
        if self.problem_class.split and not self.scheduler.cancels_clusters:
            cute.arch.griddepcontrol_launch_dependents()

    @property
    def functions(self) -> KernelFunctions:
        functions: KernelFunctions = self.parts.functions
        return functions

    @property
    def keys(self) -> KeySource:
        rows: KeySource = self.parts.keys(self)
        return rows

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        results: tuple[cute.Tensor, ...],
        optional: OptionalTensors | None,
        scalars: CallScalars,
        stream: Any,
    ):
        """Launch.  Arguments: `run.argument_types`, NOTE [arguments of the forward].  Last stride
        1, other strides multiples of 16 bytes (lse: any)."""
        optional = OptionalTensors() if optional is None else optional
        out, lse = results[:2]
        of_q, of_kv = (HEAD_DIM * size // ELEMENT_BYTES for size in (self.q_bytes, self.kv_bytes))
        keys = (by_sequence(t, columns=of_kv) for t in (k, v))
        operands = by_sequence(q, columns=of_q), *keys, by_sequence(out)
        sizes, problem = self.tile_problem(operands, optional, scalars)
        self.launch_before(operands, optional, stream)
        tensors = self.kernel_tensors(operands, lse, optional)
        if cutlass.const_expr(self.problem_class.max_logits):
            tensors = tensors._replace(row_maxima=results[2])
        grid = self.scheduler.grid_shape(problem, scalars.clusters)
        # No kernel reads what orders the tiles.
        scalars = scalars._replace(max_seqlen_k=None)
        self.kernel(tensors, sizes, scalars, problem.device_order()).launch(
            grid=grid,
            block=(self.warps.num_threads, 1, 1),
            cluster=(self.config.tiles.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def launch_before(
        self, operands: tuple[cute.Tensor, ...], optional: OptionalTensors, stream: Any
    ) -> None:
        """Launch what the kernel needs to have run: nothing.  Arguments as of `tile_problem`."""

    def context_fields(
        self, tensors: ForwardKernelTensors, sizes: tuple[Int32, ...]
    ) -> dict[str, Any]:
        optional, form = tensors.optional, self.problem_class.out_gate
        return {
            "sink": optional.sink,
            "num_splits": sizes[3] if self.problem_class.split else None,
            "q_descale": optional.q_descale,
            "k_descale": optional.k_descale,
            "v_descale": optional.v_descale,
            "out_gate": by_rows(form, optional.out_gate) if form else None,
            "gate_form": form,
        }

    def tile_problem(
        self, operands: tuple[cute.Tensor, ...], optional: OptionalTensors, scalars: Any
    ) -> tuple[tuple[Int32, ...], TileProblem]:
        """Return (sizes, tiles) of a launch: seqlen_q, seqlen_k, query heads (or groups of them)
        for each KV head, and with split keys their number. operands: q, k, v, out by (seqlen, 256,
        heads, batch)."""
        q, k, _, out = operands
        # Heads, or groups of them, that have tiles of their own.
        heads = cute.size(q, mode=[2]) // self.problem_class.packed_heads
        heads_per_kv = heads // cute.size(k, mode=[2])
        sequences = optional.ragged
        batch = sequences.num_batches(q)
        seqlen_k = self.keys.count(sequences, cute.size(k, mode=[0]))
        sizes = (cute.size(q, mode=[0]), seqlen_k, heads_per_kv)
        if cutlass.const_expr(self.problem_class.split):
            num_splits = cute.size(out, mode=[3])
            if cutlass.const_expr(sequences.scheduler_metadata is None):
                num_splits = num_splits // cute.size(q, mode=[3])
                batch = batch * num_splits
            else:
                batch = num_splits
            sizes = (*sizes, num_splits)
        # The tiles at work are of one packed sequence, or of a few shorter ones in a row.
        longest = cutlass.min(seqlen_k, scalars.max_seqlen_k)
        section_heads = section_heads_for(
            num_heads_per_kv=heads_per_kv,
            num_pairs=heads * batch,
            # Capped where 32 bits end; beyond, nothing fits into L2 anyway.
            kv_bytes_per_head=cutlass.min(longest, 1 << 20) * int(2 * HEAD_DIM * self.kv_bytes),
            l2_bytes=scalars.l2_bytes,
            unequal_lengths=self.problem_class.has_unequal_tiles,
        )
        later_blocks_first = self.problem_class.bounded_right
        num_blocks = (scalars.max_seqlen_q + self.tile_queries - 1) // self.tile_queries
        problem = TileProblem(num_blocks, heads, batch, section_heads, later_blocks_first)
        offsets = sequences.cu_seqlens_q
        if cutlass.const_expr(offsets is not None and not self.problem_class.split):
            blocks = PackedBlocks(offsets, self.tile_queries)
            problem = problem.in_a_row(blocks, cute.size(q, mode=[0]))
        return tuple(Int32(size) for size in sizes), problem

    def tma_tensor(self, name: str, view: cute.Tensor, copy: tuple[Any, int, int]) -> TmaTensor:
        """The TMA tensor of an operand, q, k, v or o.  copy: (operation, rows, columns) of a
        box."""
        operation, rows, columns = copy
        packed = self.problem_class.packed_heads
        if name in "kv":
            rows = self.keys.box_rows(rows)
        layout = cute.select(smem_layout(rows, columns, 1), mode=[0, 1])
        box, is_clipped = (rows, columns), self.problem_class.is_clipped
        if packed > 1 and name in "qo":
            of_query = query_rows(packed, rows)
            view = by_packed_heads(view, packed, of_query)
            box = ((of_query, rows // of_query), columns)
            is_clipped = "cu_seqlens_q" in self.problem_class.ragged
            # Rows of a box that are no padding.
            rows = rows // of_query * packed
        from_start = None
        if name in "kv" and self.problem_class.mask.padded_pages > 0:
            info = cpasync.make_tiled_tma_atom(operation, clipped_at_start(view, rows), layout, box)
            from_start = TmaTensor(info[0], info[1])
        if is_clipped:
            view = clipped_view(view, rows)
        info = cpasync.make_tiled_tma_atom(operation, view, layout, box)
        return TmaTensor(info[0], info[1], from_start)

    def loaded_tensor(self, name: str, view: cute.Tensor, copy: tuple[Any, int, int]) -> Any:
        return (self.tma_tensor if name == "q" else self.keys.tensor)(name, view, copy)

    @property
    def gathers(self) -> bool:
        return self.problem_class.gathers

    @property
    def lists_steps(self) -> bool:
        return self.problem_class.lists_steps

    def step_list(self, context: Context, work: Any) -> StepList:
        parts = MASK_TILE // self.config.block_kv
        return StepList.of(context.sequences.tensors, (work.batch, work.head), work.block, parts)

    def sink_log2(self, context: Context, work: Any, head: Int32) -> Any:
        """The head's sink logit in the exponent of 2, None without a sink; of a tile's parts only
        the first has it."""
        if cutlass.const_expr(context.sink is None):
            return None
        logit = context.sink[head] * math.log2(math.e)
        if cutlass.const_expr(self.problem_class.split):
            return cutlass.select_(context.part(work).number == 0, logit, Float32(-math.inf))
        return logit

    def store_lse(
        self,
        context: Context,
        work: Any,
        place: tuple[Int32, Int32],
        softmax: Any,
        lse: Float32,
        batch: Int32 | None = None,
    ) -> None:
        """Write the LSE of a row, and its greatest logit where the problem class has `max_logits`.
        place: (query, head). softmax: `OnlineSoftmax` of the row after its last step. batch:
        `result_batch` of the tile, where a caller has it."""
        query, head = place
        row = context.result_offset(context.query(work)) + query
        batch = context.result_batch(work) if batch is None else batch
        tensors = context.tensors
        tensors.lse[batch, head, row] = lse
        if self.problem_class.max_logits:
            logit = softmax.largest_logit()
            # max passes a NaN over, a sum does not: the result must show that a score is NaN.
            is_number = lse == lse
            tensors.row_maxima[batch, head, row] = cutlass.select_(is_number, logit, lse)
