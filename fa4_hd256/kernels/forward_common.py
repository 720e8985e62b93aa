"""What the forward kernels of all architectures share: their tensors, their tiles, their results.

NOTE [packed heads].  Where a group of query heads divides a CTA's rows, row r of them is query
r // group of head r % group: they read the same keys.  Tiles of a few rows take any group, each
query as many rows as the next power of two.  A causal tile then spans fewer queries, so
less of it is masked, and a few queries with many heads fill it.  TMA gathers the rows of Q through
a tensor with one dimension more.

NOTE [split keys].  Where there are fewer tiles than CTAs to work on them, the KV tiles of a query
tile may be divided among several: the scheduler then counts `num_splits` batch entries for each
one, and each part leaves its own O, in float32 and divided by its own sum, and its own LSE, from
which `forward_combine` makes the result.  The sink is the first part's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from schedulers import TileProblem, section_heads_for

from .limits import HEAD_DIM
from .operands import TmaTensor, smem_layout
from .problem_class import query_rows
from .scalars import CallScalars
from .sequences import RaggedKernel, Sequence, clipped_view
from .views import by_packed_heads, by_sequence

__all__ = ["ForwardCommon", "ForwardEntries", "ForwardTensors"]


class ForwardTensors(NamedTuple):
    """What a forward kernel reads and writes.

    q, k, v, o: (seqlen, 256, heads, batch), or for ragged sequences a `clipped_view` of it; with
    packed heads q and o are views by `by_packed_heads`, clipped where packed sequences need it.
    out: (seqlen, 256, heads, batch); lse: (batch, heads, seqlen).  With split keys, and where O is
    not stored by TMA, there is no o.  With split keys out is float32, and out and lse have
    `num_splits` batch entries for each one.  optional: what the problem class asks for: sink
    (heads,), then the tensors of the ragged sequences in its order.
    """

    q: TmaTensor
    k: TmaTensor
    v: TmaTensor
    o: TmaTensor | None
    out: Any
    lse: Any
    optional: Any


class ForwardEntries:
    """Batch entries of a forward's tiles; mixed into its context.

    num_splits: parts of a tile's keys, None where they are not divided; the scheduler's batch
    entries are then the parts of each entry, one after the other.
    """

    num_splits: Any
    sequences: Any
    scalars: Any

    def batch(self, work: Any) -> Int32:
        if cutlass.const_expr(self.num_splits is None):
            return work.batch
        return work.batch // self.num_splits

    def split(self, work: Any) -> Any:
        if cutlass.const_expr(self.num_splits is None):
            return None
        return work.batch % self.num_splits, self.num_splits, self.scalars.part_keys

    def query(self, work: Any) -> Sequence:
        """The query rows of a tile's batch entry."""
        return self.sequences.query(self.batch(work))

    def key(self, work: Any) -> Sequence:
        """The key rows of a tile's batch entry."""
        return self.sequences.key(self.batch(work))

    def result_batch(self, work: Any) -> Int32:
        """Where the results of a tile's batch entry lie."""
        batch = self.query(work).batch
        if cutlass.const_expr(self.num_splits is None):
            return batch
        return batch * self.num_splits + self.split(work)[0]


class ForwardCommon(RaggedKernel):
    """Host code of a forward kernel; mixed into it.

    A kernel has `problem_class`, `config`, `scheduler`, `warps`; `tile_queries`, the queries of a
    tile; `kernel_tensors(operands, lse, optional)`; and `kernel(tensors, sizes, scalars, order)`.
    """

    problem_class: Any
    config: Any
    tile_queries: int
    scheduler: Any
    warps: Any
    kernel: Any

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        results: tuple[cute.Tensor, cute.Tensor],
        optional: Any,
        scalars: CallScalars,
        stream: Any,
    ):
        """Launch.  q: (batch, seqlen_q, heads, 256); k, v: (batch, seqlen_k, heads_kv, 256);
        results: out like q, and lse (batch, heads, seqlen_q) float32; packed sequences have a
        batch of 1.  Last stride 1, other strides multiples of 16 bytes (lse: any).  With split
        keys out is float32, and of each batch entry of q the results have one for each part.

        optional: a tuple of what the problem class asks for, None if that is nothing: the sink,
        (heads,) float32, then tensors of `SequenceTensors` in its order.
        """
        out, lse = results
        operands = tuple(by_sequence(t) for t in (q, k, v, out))
        sizes, problem = self.tile_problem(operands, optional, scalars)
        tensors = self.kernel_tensors(operands, lse, optional)
        grid = self.scheduler.grid_shape(problem, scalars.clusters)
        self.kernel(tensors, sizes, scalars, problem.device_order()).launch(
            grid=grid,
            block=(self.warps.num_threads, 1, 1),
            cluster=(self.config.tiles.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def kernel_tensors(self, operands: tuple, lse: cute.Tensor, optional: Any) -> ForwardTensors:
        """TMA descriptors and the plain tensors.  operands: q, k, v, out by (seqlen, 256, heads,
        batch)."""
        raise NotImplementedError

    def sink_and_ragged(self, optional: Any) -> tuple[Any, tuple]:
        """(sink or None, ragged tensors) from what the problem class asks for."""
        given = tuple(optional or ())
        return (given[0], given[1:]) if self.problem_class.sink else (None, given)

    def ragged(self, tensors: ForwardTensors) -> tuple:
        return self.sink_and_ragged(tensors.optional)[1]

    def tile_problem(
        self, operands: tuple, optional: Any, scalars: Any
    ) -> tuple[tuple[Int32, ...], TileProblem]:
        """(sizes, tiles) of a launch: seqlen_q, seqlen_k, query heads (or groups of them) for each
        KV head, and with split keys their number.

        operands: q, k, v, out by (seqlen, 256, heads, batch).
        """
        q, k, _, out = operands
        # Heads, or groups of them, that have tiles of their own.
        heads = cute.size(q, mode=[2]) // self.problem_class.packed_heads
        heads_per_kv = heads // cute.size(k, mode=[2])
        _, ragged = self.sink_and_ragged(optional)
        batch = self.sequence_tensors(ragged).num_batches(q)
        sizes = (cute.size(q, mode=[0]), cute.size(k, mode=[0]), heads_per_kv)
        if cutlass.const_expr(self.problem_class.split):
            num_splits = cute.size(out, mode=[3]) // cute.size(q, mode=[3])
            batch, sizes = batch * num_splits, (*sizes, num_splits)
        section_heads, later_blocks_first = 1, False
        if cutlass.const_expr(self.config.ordered_tiles):
            section_heads = section_heads_for(
                num_heads_per_kv=heads_per_kv,
                num_pairs=heads * batch,
                # Capped where 32 bits end; beyond, nothing fits into L2 anyway.
                kv_bytes_per_head=cutlass.min(cute.size(k, mode=[0]), 1 << 20) * (2 * HEAD_DIM * 2),
                l2_bytes=scalars.l2_bytes,
                unequal_lengths=self.problem_class.has_unequal_tiles,
            )
            later_blocks_first = self.problem_class.bounded_right
        num_blocks = (scalars.max_seqlen_q + self.tile_queries - 1) // self.tile_queries
        problem = TileProblem(num_blocks, heads, batch, section_heads, later_blocks_first)
        return tuple(Int32(size) for size in sizes), problem

    def tma_tensor(self, name: str, view: cute.Tensor, copy: tuple) -> TmaTensor:
        """The TMA tensor of an operand, q, k, v or o.  copy: (operation, rows, columns) of a
        box."""
        operation, rows, columns = copy
        packed = self.problem_class.packed_heads
        layout = cute.select(smem_layout(rows, columns, 1), mode=[0, 1])
        box, is_clipped = (rows, columns), bool(self.problem_class.ragged)
        if packed > 1 and name in "qo":
            of_query = query_rows(packed, rows)
            view = by_packed_heads(view, packed, of_query)
            box = ((of_query, rows // of_query), columns)
            is_clipped = "cu_seqlens_q" in self.problem_class.ragged
            # Those of a box that are no padding.
            rows = rows // of_query * packed
        if is_clipped:
            view = clipped_view(view, rows)
        info = cpasync.make_tiled_tma_atom(operation, view, layout, box)
        return TmaTensor(info[0], info[1])

    def sink_log2(self, context: Any, work: Any, head: Int32) -> Any:
        """The head's sink logit in the exponent of 2, None without a sink; of a tile's parts only
        the first has it."""
        if cutlass.const_expr(context.sink is None):
            return None
        logit = context.sink[head] * math.log2(math.e)
        if cutlass.const_expr(self.problem_class.split):
            return cutlass.select_(context.split(work)[0] == 0, logit, Float32(-math.inf))
        return logit

    def result_row(self, context: Any, work: Any, row: Int32, head: Int32) -> cute.Tensor:
        """(256,) of `out` in global memory."""
        place = context.query(work).offset + row
        return context.tensors.out[place, None, head, context.result_batch(work)]
