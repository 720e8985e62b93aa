"""The forward kernel: out = softmax(scale * Q K^T) V and LSE at head_dim 256, by CTA pairs.

One tile is 256 query rows, of one head or of all heads that share a KV head (NOTE [packed heads]);
one step multiplies it with 128 keys.  Each CTA of the pair owns 128 rows, with their S, P and O in
its tensor memory, and loads half of every K and V tile; one warp of the leader CTA issues all MMAs
for both.

Timeline of one CTA (the peer's is the same, but for the MMA warp, which only the leader has);
QK(i) makes S(i), PV(i) adds P(i) V(i) to O, last is the tile's last step, 0' the next tile's
first::

    load        K(1) V(0) K(2) V(1) ...   | Q'  K(0')  V(last)  K(1')  V(0') ...
    mma         QK(1) PV(0) QK(2) PV(1) ..| QK(0') PV(last) QK(1') PV(0') ...
    softmax        S(1)->P(1)  S(2)->P(2) | S(last)->P(last)  S(0')->P(0') ...
    correction     rescale O   rescale O  |           O -> SMEM
    epilogue                              |                SMEM -> global

QK(i+1) is always issued before PV(i), across tiles too: while the softmax works on S(i), the
tensor core makes S(i+1), and the next tile's first S while the last P of this one is made.

The tables of roles, barriers, SMEM and TMEM: `python -m fa4_hd256 plan`; docs/forward.md.

NOTE [S and P share columns].  P(i) lies over S(i), so QK(i+2), which writes the same buffer, must
not overtake PV(i), which reads it.  Both are issued by one thread in this order, and the tensor
core executes the MMAs of a CTA pair in issue order.

NOTE [stores hidden by exponentials].  P is handed over in halves of 64 keys.  A warp that waits for
its stores to tensor memory does nothing else (tcgen05.wait::st, 60 to 300 clocks), so those of the
first half are waited for behind the exponentials of the next 32 columns.  ptxas moves arithmetic
across such a wait, but not across the loop of an mbarrier wait: the one for the factor's buffer,
over by then, stands between the two.

NOTE [O leaves through Q].  The O of a tile is staged in the tile's own Q buffer: when PV(last) has
completed, so have all QK before it, and nobody reads that Q again.  The other Q buffer already
receives the next tile's Q, so the two never wait for each other; q_free is signalled once the TMA
store has read the staged O.

NOTE [packed heads].  Where a group of query heads divides 128, row r of a CTA's half of a tile is
query r // group of head r % group: they read the same keys.  A causal tile then spans fewer
queries, so less of it is masked, and a few queries with many heads fill it.  TMA gathers the rows
of Q, and scatters those of O, through a tensor with one dimension more.

NOTE [split keys].  Where there are fewer tiles than CTA pairs, the KV tiles of a query tile may be
divided among several: the scheduler then counts `num_splits` batch entries for each one, and each
part leaves its own O, in float32 and divided by its own sum, and its own LSE, from which
`forward_combine` makes the result.  The sink is the first part's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from fa4_hd256.kernels.blackwell.instructions import MmaShape, TmemOperand
from fa4_hd256.kernels.blackwell.operands import (
    TmaTensor,
    k_major_operand,
    mn_major_operand,
    smem_layout,
)
from fa4_hd256.kernels.blackwell.pair_kernel import CLUSTER, PairContext, PairKernel, SharedMemory
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.kernels.scalars import CallScalars
from fa4_hd256.kernels.sequences import Sequence, clipped_view
from fa4_hd256.kernels.views import by_packed_heads, by_sequence
from schedulers import TileOrder, TileProblem, section_heads_for
from softmax_emu.online import OnlineSoftmax

from .config import ForwardConfig
from .consumers import ForwardConsumers
from .producers import ForwardProducers

__all__ = ["ForwardKernel"]


class KernelTensors(NamedTuple):
    """What the kernel reads and writes.

    q, k, v, o: (seqlen, 256, heads, batch), or for ragged sequences a `clipped_view` of it; with
    packed heads q and o are views by `by_packed_heads`, clipped where packed sequences need it.
    out: (seqlen, 256, heads, batch); lse: (batch, heads, seqlen).  With split keys there is no o,
    out is float32, and out and lse have `num_splits` batch entries for each one.  optional: what
    the problem class asks for: sink (heads,), then the tensors of the ragged sequences in its
    order.
    """

    q: TmaTensor
    k: TmaTensor
    v: TmaTensor
    o: TmaTensor | None
    out: Any
    lse: Any
    optional: Any


@dataclass(frozen=True)
class Context(PairContext):
    """What every warp role of one CTA shares.

    sink: (heads,) or None.  smem: "q", "k", "v" operands with their stages, "scale".
    num_splits: parts of a tile's keys, None where they are not divided; the scheduler's batch
    entries are then the parts of each entry, one after the other.
    """

    sink: Any = None
    num_splits: Any = None

    def batch(self, work: Any) -> Int32:
        if cutlass.const_expr(self.num_splits is None):
            return work.batch
        return work.batch // self.num_splits

    def split(self, work: Any) -> Any:
        if cutlass.const_expr(self.num_splits is None):
            return None
        return work.batch % self.num_splits, self.num_splits

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


class ForwardKernel(PairKernel, ForwardProducers, ForwardConsumers):
    """The forward kernel for one configuration.

    config: tile shapes, stages, warps, exp2 pattern.  problem_class: what of a call is compiled in.
    scheduler: a class of the `schedulers` protocol; None for that of the problem class.

    Called under `cute.compile`; see `__call__` for the arguments at run time.
    """

    def __init__(
        self, config: ForwardConfig, problem_class: ProblemClass, scheduler: Any = None
    ) -> None:
        super().__init__(config, problem_class, scheduler)
        self.config = config
        # Queries of a tile and of a CTA's half of it.
        self.tile_queries = config.tile_q // problem_class.packed_heads
        self.block_queries = config.block_q // problem_class.packed_heads
        negate, is_bf16 = problem_class.negative_scale, self.is_bf16
        self.shapes = {
            "S": MmaShape(config.tile_q, config.block_kv, is_bf16, negate_a=negate),
            "O": MmaShape(config.tile_q, HEAD_DIM, is_bf16, b_mn_major=True),
        }
        self.layouts = {
            "Q": k_major_operand(config.block_q),
            "K": k_major_operand(config.block_kv // 2),
            "V": mn_major_operand(config.block_kv),
            "P": TmemOperand.contiguous(config.block_kv),
        }

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
        config = self.config
        out, lse = results
        q, k, v, out = (by_sequence(t) for t in (q, k, v, out))
        # Heads, or groups of them, that have tiles of their own.
        heads = cute.size(q, mode=[2]) // self.problem_class.packed_heads
        heads_per_kv = heads // cute.size(k, mode=[2])
        _, ragged = self._sink_and_ragged(optional)
        batch = self.sequence_tensors(ragged).num_batches(q)
        sizes = (cute.size(q, mode=[0]), cute.size(k, mode=[0]), heads_per_kv)
        if cutlass.const_expr(self.problem_class.split):
            num_splits = cute.size(out, mode=[3]) // cute.size(q, mode=[3])
            batch, sizes = batch * num_splits, (*sizes, num_splits)
        tensors = self._kernel_tensors((q, k, v, out), lse, optional)
        section_heads, later_blocks_first = 1, False
        if cutlass.const_expr(config.ordered_tiles):
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
        grid = self.scheduler.grid_shape(problem, scalars.clusters)
        sizes = tuple(Int32(size) for size in sizes)
        self.kernel(tensors, sizes, scalars, problem.device_order()).launch(
            grid=grid,
            block=(config.warps.num_threads, 1, 1),
            cluster=CLUSTER,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _sink_and_ragged(self, optional: Any) -> tuple[Any, tuple]:
        """(sink or None, ragged tensors) from what the problem class asks for."""
        given = tuple(optional or ())
        return (given[0], given[1:]) if self.problem_class.sink else (None, given)

    def ragged(self, tensors: KernelTensors) -> tuple:
        return self._sink_and_ragged(tensors.optional)[1]

    def _kernel_tensors(
        self, operands: tuple, lse: cute.Tensor, optional: Any
    ) -> KernelTensors:
        """TMA descriptors of Q, K, V and O, and the plain tensors."""
        config, packed = self.config, self.problem_class.packed_heads
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        store = cpasync.CopyBulkTensorTileS2GOp()
        boxes = (
            (load, config.block_q, HEAD_DIM),
            (load, config.block_kv // 2, HEAD_DIM),
            (load, config.block_kv, HEAD_DIM // 2),
            (store, config.block_q, config.o_slice),
        )
        tmas = []
        for name, (operation, rows, columns), view in zip("qkvo", boxes, operands, strict=True):
            if name == "o" and self.problem_class.split:
                tmas.append(None)
                continue
            layout = cute.select(smem_layout(self.dtype, rows, columns, 1), mode=[0, 1])
            box, is_clipped = (rows, columns), bool(self.problem_class.ragged)
            if packed > 1 and name in "qo":
                view = by_packed_heads(view, packed)
                box = ((packed, rows // packed), columns)
                is_clipped = "cu_seqlens_q" in self.problem_class.ragged
            if is_clipped:
                view = clipped_view(view, rows)
            info = cpasync.make_tiled_tma_atom(operation, view, layout, box)
            tmas.append(TmaTensor(info[0], info[1]))
        return KernelTensors(*tmas, operands[3], lse, optional)

    def descriptors(self, tensors: KernelTensors) -> tuple[TmaTensor, ...]:
        given = tensors.q, tensors.k, tensors.v, tensors.o
        return given[:3] if self.problem_class.split else given

    @cute.jit
    def run_role(self, context: Any, warp: Int32):
        """The role of this warp, with its register budget."""
        warps = self.config.warps
        if warp < warps.correction[0]:
            self._set_registers(warps.registers_softmax)
            self.softmax(context)
        elif warp < warps.mma:
            self._set_registers(warps.registers_correction)
            self.correction(context)
        else:
            self._set_registers(warps.registers_other)
            if warp == warps.mma:
                if context.cta_rank == 0:
                    self.mma(context)
            if warp == warps.load:
                self.load(context)
            if warp == warps.epilogue:
                self.epilogue(context)
            if warp == warps.scheduler:
                self.schedule(context)

    def _set_registers(self, budget: int) -> None:
        """setmaxnreg (PTX ISA 9.7.20.5) to a role's budget, up or down from that of the launch."""
        if budget > self.warps.registers.at_launch:
            cute.arch.setmaxregister_increase(budget)
        else:
            cute.arch.setmaxregister_decrease(budget)

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        config = self.config
        kv_stages = config.kv_stages
        scale_layout = cute.make_layout((config.block_q, config.scale_stages))
        return {
            "q": memory.operand("q", config.block_q, HEAD_DIM, config.q_stages),
            "k": memory.operand("kv", config.block_kv // 2, HEAD_DIM, kv_stages),
            "v": memory.operand("kv", config.block_kv, HEAD_DIM // 2, kv_stages),
            "scale": cute.make_tensor(memory.region("scale", Float32, 16), scale_layout),
        }

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: KernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> Context:
        """`PairKernel.set_up`; with split keys their number is the last of the sizes."""
        common = super().set_up(allocator, tensors, sizes, scalars, order)
        sink, _ = self._sink_and_ragged(tensors.optional)
        num_splits = sizes[3] if self.problem_class.split else None
        return Context(**vars(common), sink=sink, num_splits=num_splits)

    def create_softmax(self, context: Context) -> OnlineSoftmax:
        """The online softmax of one row."""
        config = self.config
        return OnlineSoftmax.create(
            context.scalars.scale_log2, config.ex2_pattern, config.rescale_threshold, self.dtype,
            config.arithmetic,
        )  # fmt: skip

    def first_row(self, context: Context, work: Any) -> Int32:
        """The first query of this CTA's half of a tile."""
        return work.block * self.tile_queries + context.cta_rank * self.block_queries

    def query_and_head(self, context: Context, work: Any, row: Int32) -> tuple[Int32, Int32]:
        """What a row of this CTA's half of a tile belongs to."""
        packed = self.problem_class.packed_heads
        return self.first_row(context, work) + row // packed, work.head * packed + row % packed

    def num_steps(self, context: Context, work: Any) -> Int32:
        """Steps of a tile; the same in both CTAs and all roles."""
        visibility = context.visibility(work, self.config.block_kv)
        return visibility.num_tiles(work.block * self.tile_queries, self.tile_queries)
