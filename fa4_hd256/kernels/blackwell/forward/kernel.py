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

NOTE [packed heads] and NOTE [split keys]: `kernels.forward.common`; NOTE [listed tiles]:
`kernels.mask.block_mask`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from ....schedulers import TileOrder
from ....softmax_emu.online import OnlineSoftmax
from ...forward.common import ForwardCommon
from ...forward.context import ForwardKernelTensors
from ...limits import HEAD_DIM
from ...operands import SharedMemory, TmaTensor
from ...problem_class import ProblemClass
from ...scalars import CallScalars
from ..instructions import MmaShape, TmemOperand
from ..operands import k_major_operand, mn_major_operand
from ..pair_kernel import PairKernel
from .config import ForwardConfig
from .consumers import ForwardConsumers
from .context import BlackwellForwardContext
from .producers import ForwardProducers

__all__ = ["ForwardKernel"]


class ForwardKernel(ForwardCommon, PairKernel, ForwardProducers, ForwardConsumers):
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
        # Each CTA loads half of the keys of K's tile.
        self.load_keys = config.block_kv // 2
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

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: Any
    ) -> ForwardKernelTensors:
        """TMA descriptors of Q, K, V and O, and the plain tensors."""
        config = self.config
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        boxes = {
            "q": (load, config.block_q, HEAD_DIM),
            "k": (load, config.block_kv // 2, HEAD_DIM),
            "v": (load, config.block_kv, HEAD_DIM // 2),
            "o": (cpasync.CopyBulkTensorTileS2GOp(), config.block_q, config.o_slice),
        }
        q, k, v = (
            self.tma_tensor(name, view, boxes[name])
            for name, view in zip("qkv", operands[:3], strict=True)
        )
        out = operands[3]
        o = None if self.problem_class.split else self.tma_tensor("o", out, boxes["o"])
        return ForwardKernelTensors(q, k, v, o, out, lse, optional)

    def descriptors(self, tensors: ForwardKernelTensors) -> tuple[TmaTensor, ...]:
        loads = tensors.q, tensors.k, tensors.v
        return loads if tensors.o is None else (*loads, tensors.o)

    @cute.jit
    def run_role(self, context: BlackwellForwardContext, warp: Int32):
        """The role of this warp, with its register budget."""
        warps = self.config.warps
        if warp < warps.correction[0]:
            self.set_registers(warps.registers_softmax)
            self.softmax(context)
        elif warp < warps.mma:
            self.set_registers(warps.registers_correction)
            self.correction(context)
        else:
            self.set_registers(warps.registers_other)
            if warp == warps.mma:
                if context.cta_rank == 0:
                    self.mma(context)
            if warp == warps.load:
                self.load(context)
            if warp == warps.epilogue:
                self.epilogue(context)
            if warp == warps.scheduler:
                self.schedule(context)

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
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> BlackwellForwardContext:
        """`PairKernel.set_up`; with split keys their number is the last of the sizes."""
        common = super().set_up(allocator, tensors, sizes, scalars, order)
        sink, _ = self.sink_and_ragged(tensors.optional)
        num_splits = sizes[3] if self.problem_class.split else None
        return BlackwellForwardContext(**vars(common), sink=sink, num_splits=num_splits)

    def create_softmax(self, context: BlackwellForwardContext) -> OnlineSoftmax:
        """The online softmax of one row."""
        config = self.config
        return OnlineSoftmax.create(
            context.scalars.scale_log2,
            config.ex2_pattern,
            config.rescale_threshold,
            self.dtype,
            config.arithmetic,
            tracks_largest=self.problem_class.max_logits,
        )

    def first_row(self, context: BlackwellForwardContext, work: Any) -> Int32:
        """The first query of this CTA's half of a tile."""
        return work.block * self.tile_queries + context.cta_rank * self.block_queries

    def query_and_head(
        self, context: BlackwellForwardContext, work: Any, row: Int32
    ) -> tuple[Int32, Int32]:
        """Return (query, head) of a row of this CTA's half of a tile."""
        packed = self.problem_class.packed_heads
        return self.first_row(context, work) + row // packed, work.head * packed + row % packed

    def num_steps(self, context: BlackwellForwardContext, work: Any) -> Int32:
        """Steps of a tile; the same in both CTAs and all roles."""
        if cutlass.const_expr(self.lists_steps):
            return self.step_list(context, work).count
        visibility = context.visibility(work, self.config.block_kv)
        return visibility.num_tiles(work.block * self.tile_queries, self.tile_queries)
