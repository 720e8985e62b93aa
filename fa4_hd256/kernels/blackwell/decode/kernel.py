"""The decode kernel: the forward of a few query rows against many keys, by one CTA per tile.

One tile is 16, 32 or 64 query rows, those of all heads that share a KV head, of a few queries; one
step multiplies 128 keys with it, S^T = K Q^T and O^T += V^T P^T.  Why so: `config` NOTE [keys as
M].

Timeline of a CTA; QK(i) makes S(i) from two halves of K, PV(i) adds to both halves of O, last is
the tile's last step, 0' the next tile's first::

    load     K(1) V(0) K(2) V(1) ..   | Q' K(0')  V(last) K(1')  V(0') ..
    mma      QK(1) PV(0) QK(2) PV(1)..| QK(0') PV(last)   QK(1') PV(0') ..
    softmax     S(1)->P(1)  S(2)->P(2)|          O -> global, S(0')->P(0') ..

The tables of roles, barriers, SMEM and TMEM: `python -m fa4_hd256 plan`; docs/forward.md.

NOTE [the same warps for all].  A row's maximum and sum go over all keys of a step, so over all
threads that have the row; each knows its offset.  So the same warps rescale O, whose lanes are
columns of the head, and store it: o_done says that they may, and P that they have.  With 64 rows
there are two such groups of warps: `config` NOTE [two groups].

NOTE [O leaves from registers].  A lane has one of the head's columns, a warp 32 of them in a row:
stores of a row by a warp are whole sectors without an exchange.

NOTE [packed heads] and NOTE [split keys]: `kernels.forward.common`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....schedulers import TileOrder
from ...forward.common import ForwardCommon
from ...forward.context import ForwardKernelTensors
from ...forward.decode_softmax import BARRIER
from ...limits import HEAD_DIM
from ...operands import SharedMemory, TmaTensor
from ...problem_class import ProblemClass, query_rows
from ...scalars import CallScalars
from ..instructions import MmaShape, OperandLayout
from ..operands import k_major_operand, mn_major_operand
from ..pair_kernel import PairKernel
from .config import BLOCK_KV, HALF, DecodeConfig
from .consumers import DecodeConsumers
from .context import BlackwellDecodeContext
from .producers import DecodeProducers
from .steps import HALVES, MMA_K

__all__ = ["DecodeKernel"]

# P^T lies by core matrices of 8 keys x 8 rows, 16 bytes per key: those of neighbouring keys first.
GROUP = 8
CORE_BYTES = 128
GROUP_BYTES = BLOCK_KV // GROUP * CORE_BYTES


class DecodeKernel(ForwardCommon, PairKernel, DecodeProducers, DecodeConsumers):
    """The decode kernel for one configuration.

    config: rows, stages, warps, exp2 pattern.  problem_class: what of a call is compiled in.
    scheduler: a class of the `schedulers` protocol for clusters of one CTA; None for that of the
    problem class.

    Called under `cute.compile`; see `ForwardCommon.__call__` for the arguments at run time.
    """

    ctas = 1

    def __init__(
        self, config: DecodeConfig, problem_class: ProblemClass, scheduler: Any = None
    ) -> None:
        super().__init__(config, problem_class, scheduler)
        self.config = config
        # Rows of a query, those of padding among them, and queries of a tile.
        self.of_query = query_rows(problem_class.packed_heads, config.rows)
        self.tile_queries = config.rows // self.of_query
        self.load_keys = BLOCK_KV
        rows, is_bf16 = config.rows, self.is_bf16
        scores = MmaShape(
            BLOCK_KV, rows, is_bf16, negate_a=problem_class.negative_scale, ctas=self.ctas
        )
        sums = MmaShape(HALF, rows, is_bf16, a_mn_major=True, b_mn_major=True, ctas=self.ctas)
        self.shapes = {"S": scores} | {f"O{half}": sums for half in HALVES}
        slices = tuple(k * MMA_K // GROUP * CORE_BYTES for k in range(BLOCK_KV // MMA_K))
        self.layouts = {
            "Q": k_major_operand(rows),
            "P": OperandLayout(CORE_BYTES, GROUP_BYTES, slices, is_swizzled=False),
        }
        self.layouts |= {f"K{half}": k_major_operand(BLOCK_KV, HALF) for half in HALVES}
        self.layouts |= {f"V{half}": mn_major_operand(BLOCK_KV) for half in HALVES}

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: Any
    ) -> ForwardKernelTensors:
        """TMA descriptors of Q, K and V, and the plain tensors."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        keys = load, BLOCK_KV, HALF
        boxes = {"q": (load, self.config.rows, HEAD_DIM), "k": keys, "v": keys}
        tmas = [
            self.tma_tensor(name, view, boxes[name])
            for name, view in zip("qkv", operands[:3], strict=True)
        ]
        return ForwardKernelTensors(*tmas, None, operands[3], lse, optional)

    def descriptors(self, tensors: ForwardKernelTensors) -> tuple[TmaTensor, ...]:
        return tensors.q, tensors.k, tensors.v

    @cute.jit
    def run_role(self, context: BlackwellDecodeContext, warp: Int32):
        """The role of this warp."""
        warps = self.config.warps
        if warp < warps.mma:
            self.set_registers(warps.registers_softmax)
            self.softmax(self._of_group(context, warp))
        else:
            self.run_other_role(context, warp)

    @cute.jit
    def run_other_role(self, context: BlackwellDecodeContext, warp: Int32):
        """Run the role of a warp without softmax."""
        warps = self.config.warps
        self.set_registers(warps.registers_other)
        if warp == warps.mma:
            self.mma(context)
        if warp == warps.load:
            self.load(context)
        if warp == warps.scheduler:
            self.schedule(context)

    def _of_group(self, context: BlackwellDecodeContext, warp: Int32) -> BlackwellDecodeContext:
        """Return the context of a softmax warp's group, `config` NOTE [two groups]: its rows are
        the first of tables and of tensor memory."""
        rows = self.softmax_rows
        if self.config.softmax_groups == 1:
            return context
        group = warp // self.softmax_warps
        tables = {
            name: cute.local_tile(table, (rows, cute.size(table, mode=[1])), (group, 0))
            for name, table in context.smem.items()
            if name in context.of_rows
        }
        return replace(
            context,
            smem=context.smem | tables,
            own_lanes=context.own_lanes + group * rows,
            first_row=group * rows,
            barrier=BARRIER + group,
        )

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        config = self.config
        rows, groups = config.rows, config.rows // GROUP
        p_layout = cute.make_layout(
            ((GROUP, groups), BLOCK_KV, 1),
            stride=((1, GROUP * BLOCK_KV), GROUP, rows * BLOCK_KV),
        )
        warps = self.softmax_warps
        shapes = {"maxima": (rows, warps), "sums": (rows, warps), "inverses": (rows, 1)}
        return {
            "q": memory.operand("q", rows, HEAD_DIM, config.q_stages),
            "kv": memory.operand("kv", BLOCK_KV, HALF, config.half_stages),
            "p": cute.make_tensor(memory.region("p", self.dtype, 128), p_layout),
        } | {
            name: cute.make_tensor(memory.region(name, Float32, 16), cute.make_layout(shape))
            for name, shape in shapes.items()
        }

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> BlackwellDecodeContext:
        """`PairKernel.set_up`; with split keys their number is the last of the sizes."""
        common = super().set_up(allocator, tensors, sizes, scalars, order)
        sink, _ = self.sink_and_ragged(tensors.optional)
        num_splits = sizes[3] if self.problem_class.split else None
        return BlackwellDecodeContext(**vars(common), sink=sink, num_splits=num_splits)
